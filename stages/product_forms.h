/* The product's template for each instruction set and form of weights. A part of products.c, whose
 * head says how each form lies in memory. */
#define AVX2 __attribute__((target("avx2,fma")))
#define VNNI __attribute__((target("avx2,fma,avx512vl,avx512vnni")))
#define INLINE static inline __attribute__((always_inline))

INLINE int32_t load_int(const int8_t *from)
{
    int32_t value;
    memcpy(&value, from, sizeof value);
    return value;
}

AVX2 INLINE __m256 from_bfloat16(__m128i halves)
{
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
}

/* Codes of set `set` from a plane of `bits` bits, at bit `to` of bytes. */
AVX2 INLINE __m256i bits_of(const uint8_t *plane, int bits, int set, int to)
{
    const int at = set * bits % 8;
    const __m256i all = _mm256_load_si256((const __m256i *)plane + set * bits / 8);
    /* What crosses from byte to byte does not pass the mask. */
    const __m256i moved =
        at < to ? _mm256_slli_epi16(all, to - at) : _mm256_srli_epi16(all, at - to);
    return _mm256_and_si256(moved, _mm256_set1_epi8((char)(((1 << bits) - 1) << to)));
}

AVX2 INLINE __m256i codes_of_3(const uint8_t *planes, int set)
{
    return _mm256_or_si256(bits_of(planes, 2, set, 0), bits_of(planes + 2 * GROUP, 1, set, 2));
}

AVX2 INLINE __m256i codes_of_6(const uint8_t *planes, int set)
{
    return _mm256_or_si256(bits_of(planes, 4, set, 0), bits_of(planes + 4 * GROUP, 2, set, 4));
}

AVX2 INLINE __m256i bytes_of(const uint8_t *codes, int set, int bias)
{
    const __m256i all = _mm256_load_si256((const __m256i *)codes + set);
    return _mm256_xor_si256(all, _mm256_set1_epi8((char)bias));
}

static const int8_t nf4_levels[16] = {-127, -88, -67, -50, -36, -23, -12, 0,
                                      10,   20,  31,  43,  56,  71,  92,  127};

/* As signed bytes, or with a bias of 128, which turns the highest bit. */
AVX2 INLINE __m256i levels_of(const uint8_t *plane, int set, int bias)
{
    const __m128i table = _mm_xor_si128(_mm_loadu_si128((const __m128i *)nf4_levels),
                                        _mm_set1_epi8((char)bias));
    return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(table), bits_of(plane, 4, set, 0));
}

AVX2 INLINE __m256i pairs_sum(__m256i pairs)
{
    return _mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
}

/* Unsigned bytes times signed ones; 15 * 127 * 2 * 8 steps fit in 16 bits. */
#define UNSIGNED(sum, w, x) _mm256_add_epi16(sum, _mm256_maddubs_epi16(w, x))
/* The same for codes of up to 63. */
#define WIDER(sum, w, x) _mm256_add_epi32(sum, pairs_sum(_mm256_maddubs_epi16(w, x)))
/* Signed bytes: the sign of a weight goes to the activation. 127 * 127 * 2 fit in 16 bits. */
#define SIGNED(sum, w, x)                                                                          \
    _mm256_add_epi32(                                                                              \
        sum, pairs_sum(_mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(x, w))))
#define MENDED(mend, a, b) _mm256_add_epi32(_mm256_set1_epi32(mend), _mm256_add_epi32(a, b))

#define TARGET AVX2
#define NAME(x) x##_int6_avx2
#define FORM INT6
#define WEIGHTS(at, set) codes_of_6(at, set)
#define DOT WIDER
#define TOTAL(a, b, mend) MENDED(mend, a, b)
#define WIDE 0
#include "product_tile.h"

#define TARGET AVX2
#define NAME(x) x##_int4_avx2
#define FORM INT4
#define WEIGHTS(at, set) bits_of(at, 4, set, 0)
#define DOT UNSIGNED
#define TOTAL(a, b, mend) MENDED(mend, pairs_sum(a), pairs_sum(b))
#define WIDE 0
#include "product_tile.h"

#define TARGET AVX2
#define NAME(x) x##_int3_avx2
#define FORM INT3
#define WEIGHTS(at, set) codes_of_3(at, set)
#define DOT UNSIGNED
#define TOTAL(a, b, mend) MENDED(mend, pairs_sum(a), pairs_sum(b))
#define WIDE 0
#include "product_tile.h"

#define TARGET AVX2
#define NAME(x) x##_int2_avx2
#define FORM INT2
#define WEIGHTS(at, set) bits_of(at, 2, set, 0)
#define DOT UNSIGNED
#define TOTAL(a, b, mend) MENDED(mend, pairs_sum(a), pairs_sum(b))
#define WIDE 0
#include "product_tile.h"

#define TARGET AVX2
#define NAME(x) x##_int8_avx2
#define FORM INT8
#define WEIGHTS(at, set) bytes_of(at, set, 128)
#define DOT SIGNED
#define TOTAL(a, b, mend) _mm256_add_epi32(a, b)
#define WIDE 0
#include "product_tile.h"

#define TARGET AVX2
#define NAME(x) x##_nf4_avx2
#define FORM NF4
#define WEIGHTS(at, set) levels_of(at, set, 0)
#define DOT SIGNED
#define TOTAL(a, b, mend) _mm256_add_epi32(a, b)
#define WIDE 0
#include "product_tile.h"

#define TARGET VNNI
#define NAME(x) x##_int6_vnni
#define FORM INT6
#define WEIGHTS(at, set) codes_of_6(at, set)
#define WIDE 1
#include "product_tile.h"

#define TARGET VNNI
#define NAME(x) x##_int4_vnni
#define FORM INT4
#define WEIGHTS(at, set) bits_of(at, 4, set, 0)
#define WIDE 1
#include "product_tile.h"

#define TARGET VNNI
#define NAME(x) x##_int3_vnni
#define FORM INT3
#define WEIGHTS(at, set) codes_of_3(at, set)
#define WIDE 1
#include "product_tile.h"

#define TARGET VNNI
#define NAME(x) x##_int2_vnni
#define FORM INT2
#define WEIGHTS(at, set) bits_of(at, 2, set, 0)
#define WIDE 1
#include "product_tile.h"

#define TARGET VNNI
#define NAME(x) x##_int8_vnni
#define FORM INT8
#define WEIGHTS(at, set) bytes_of(at, set, 0)
#define WIDE 1
#include "product_tile.h"

#define TARGET VNNI
#define NAME(x) x##_nf4_vnni
#define FORM NF4
#define WEIGHTS(at, set) levels_of(at, set, 128)
#define WIDE 1
#include "product_tile.h"
