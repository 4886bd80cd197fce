/* Eight outputs for up to four rows, or eight. Included by product_forms.h once for each instruction
 * set and form of weights, with
 *   TARGET                      the function attributes of that instruction set
 *   NAME(x)                     x with its suffix
 *   FORM                        one of the forms of products.h
 *   WEIGHTS(at, set)            the weights of a set of 4 columns, eight outputs; at: the group
 *   WIDE                        whether there are 32 registers, and dpbusd; if not, also
 *   DOT(sum, w, x)              sum + products of the weights w and the signed bytes x
 *   TOTAL(a, b, mend)           eight 32-bit sums: what DOT gathered in a and b, and where weights
 *                               have a bias, what mends it
 */
#if WIDE
/* What mends a bias is where the sum starts, so that it takes no instruction of its own. */
#define DOT _mm256_dpbusd_epi32
#define START _mm256_set1_epi32
#define TOTAL(a, b, mend) _mm256_add_epi32(a, b)
#else
#define START(mend) _mm256_setzero_si256()
#endif
#if FORM == INT8
#define CODE_BYTES (8 * GROUP)
#elif FORM == INT6
#define CODE_BYTES (6 * GROUP)
#elif FORM == INT3
#define CODE_BYTES (3 * GROUP)
#elif FORM == INT2
#define CODE_BYTES (2 * GROUP)
#else
#define CODE_BYTES (4 * GROUP)
#endif
#define GROUP_BYTES (CODE_BYTES + (FORM == INT8 ? 0 : 32))
#define AFFINE (FORM == INT6 || FORM == INT4 || FORM == INT3 || FORM == INT2)

/* rows is a constant wherever this is inlined, so that the sums live in registers. */
TARGET static inline __attribute__((always_inline)) void NAME(tile)(
    const int rows, const Work *work, ptrdiff_t number, ptrdiff_t row, float *out, ptrdiff_t count)
{
    const ptrdiff_t width = work->groups * GROUP;
    const uint8_t *block = work->weights + number * work->groups * GROUP_BYTES;
    const int8_t *codes = work->codes + row * width;
    const Part *parts = work->parts + row * work->groups;
    __m256 sum[8];
    __m256i low[8], high[8];

    for (int r = 0; r < rows; r++)
        sum[r] = _mm256_setzero_ps();
    for (ptrdiff_t g = 0; g < work->groups; g++, block += GROUP_BYTES) {
        for (int line = 0; row == 0 && line < GROUP_BYTES; line += 64)
            _mm_prefetch((const char *)block + AHEAD + line, _MM_HINT_T0);
        for (int r = 0; r < rows; r++) {
            low[r] = START(parts[r * work->groups + g].mend);
            high[r] = _mm256_setzero_si256();
        }
#pragma GCC unroll 8
        for (int step = 0; step < 8; step++) {
            const __m256i first = WEIGHTS(block, 2 * step), second = WEIGHTS(block, 2 * step + 1);
#pragma GCC unroll 8
            for (int r = 0; r < rows; r++) {
                const int8_t *from = codes + r * width + g * GROUP + 8 * step;
                low[r] = DOT(low[r], first, _mm256_set1_epi32(load_int(from)));
                high[r] = DOT(high[r], second, _mm256_set1_epi32(load_int(from + 4)));
            }
        }
#if AFFINE
        const __m256i pairs = _mm256_load_si256((const __m256i *)(block + CODE_BYTES));
        const __m256 scale = from_bfloat16(_mm256_castsi256_si128(pairs));
        const __m256 offset = from_bfloat16(_mm256_extracti128_si256(pairs, 1));
#elif FORM == NF4
        const __m256 scale = _mm256_load_ps((const float *)(block + CODE_BYTES));
#endif
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) {
            const Part *part = parts + r * work->groups + g;
            const __m256 total = _mm256_cvtepi32_ps(TOTAL(low[r], high[r], part->mend));
#if FORM == INT8
            sum[r] = _mm256_fmadd_ps(total, _mm256_set1_ps(part->scale), sum[r]);
#else
            const __m256 both = _mm256_mul_ps(scale, _mm256_set1_ps(part->scale));
            sum[r] = _mm256_fmadd_ps(total, both, sum[r]);
#endif
#if AFFINE
            sum[r] = _mm256_fmadd_ps(offset, _mm256_set1_ps(part->sum), sum[r]);
#endif
        }
    }
#if FORM == INT8
    /* A row's scale stands behind the codes of all blocks. */
    const uint8_t *scales = work->weights + work->blocks * work->groups * GROUP_BYTES;
    const __m256 scale = from_bfloat16(_mm_loadu_si128((const __m128i *)scales + number));
    for (int r = 0; r < rows; r++)
        sum[r] = _mm256_mul_ps(sum[r], scale);
#endif
    for (int r = 0; r < rows; r++) {
        if (count == BLOCK) {
            _mm256_storeu_ps(out + r * work->outputs, sum[r]);
        } else {
            float whole[BLOCK];
            _mm256_storeu_ps(whole, sum[r]);
            memcpy(out + r * work->outputs, whole, (size_t)count * sizeof(float));
        }
    }
}

/* Blocks [from, to) for all rows: a block's weights are read from memory once. */
TARGET static void NAME(multiply)(const Work *work, ptrdiff_t from, ptrdiff_t to)
{
    for (ptrdiff_t b = from; b < to; b++) {
        const ptrdiff_t left = work->outputs - b * BLOCK, count = left < BLOCK ? left : BLOCK;
        float *out = work->out + b * BLOCK;
        ptrdiff_t row = 0;
        if (WIDE)
            for (; row + 8 <= work->rows; row += 8, out += 8 * work->outputs)
                NAME(tile)(8, work, b, row, out, count);
        for (; row + 4 <= work->rows; row += 4, out += 4 * work->outputs)
            NAME(tile)(4, work, b, row, out, count);
        if (row + 3 == work->rows)
            NAME(tile)(3, work, b, row, out, count);
        else if (row + 2 == work->rows)
            NAME(tile)(2, work, b, row, out, count);
        else if (row + 1 == work->rows)
            NAME(tile)(1, work, b, row, out, count);
    }
}

#undef CODE_BYTES
#undef GROUP_BYTES
#undef AFFINE
#undef TARGET
#undef NAME
#undef FORM
#undef WEIGHTS
#undef DOT
#undef WIDE
#undef TOTAL
#undef START
