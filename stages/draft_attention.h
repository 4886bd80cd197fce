/* Attention of a few rows over keys that are named one by one. Included by draft_layers.c.
 *
 * Softmax goes over a tile of keys at a time: a query's state is the largest score so far, the
 * sum of e^(score - largest), and the sum of the values so weighed. States over different keys
 * can be joined, so threads may share a run of keys.
 */
#ifndef DRAFT_ATTENTION_H
#define DRAFT_ATTENTION_H

#include <math.h>
#include <string.h>

#include "float_lanes.h"

enum { TILE = 32, QUAD = 4, STATE = 8 };

/* Keys and values of one head, at most TILE of them, each of `dim` floats. */
typedef struct {
    const float *keys[TILE], *values[TILE];
    ptrdiff_t count;
} Tile;

/* A state: its largest score, its sum, six floats unused, then `dim` weighed sums. */
static void clear_states(float *state, ptrdiff_t count, ptrdiff_t dim)
{
    memset(state, 0, (size_t)(count * (STATE + dim)) * sizeof(float));
    for (ptrdiff_t i = 0; i < count; i++)
        state[i * (STATE + dim)] = -INFINITY;
}

/* Most keys stand one behind another, and a tile's worth further on is what comes next. Into the
 * second cache: the first has no room for it. What is named need not be there. */
LANE void prefetch(const float *from, ptrdiff_t dim)
{
    _mm_prefetch((const char *)(from + TILE * dim), _MM_HINT_T1);
}

/* The sums of the lanes of each of four. */
LANE __m128 four_sums(const __m256 *of)
{
    const __m256 pairs =
        _mm256_hadd_ps(_mm256_hadd_ps(of[0], of[1]), _mm256_hadd_ps(of[2], of[3]));
    return _mm_add_ps(_mm256_castps256_ps128(pairs), _mm256_extractf128_ps(pairs, 1));
}

/* Scores of `queries` queries (constant where inlined) with two keys. */
LANE void two_scores(const int queries, const int ahead, const float *q, ptrdiff_t dim,
                     const float *a, const float *b, float (*scores)[QUAD])
{
    __m256 with_a[QUAD], with_b[QUAD];
    for (int i = 0; i < QUAD; i++)
        with_a[i] = with_b[i] = _mm256_setzero_ps();
    for (ptrdiff_t d = 0; d < dim; d += 8) {
        if (ahead && d % 16 == 0) {
            prefetch(a + d, dim);
            prefetch(b + d, dim);
        }
        const __m256 key_a = _mm256_loadu_ps(a + d), key_b = _mm256_loadu_ps(b + d);
#pragma GCC unroll 4
        for (int i = 0; i < queries; i++) {
            const __m256 query = _mm256_loadu_ps(q + i * dim + d);
            with_a[i] = _mm256_fmadd_ps(query, key_a, with_a[i]);
            with_b[i] = _mm256_fmadd_ps(query, key_b, with_b[i]);
        }
    }
    _mm_storeu_ps(scores[0], four_sums(with_a));
    _mm_storeu_ps(scores[1], four_sums(with_b));
}

/* Scores become weights; what a query had so far counts `factor` times what it did. */
LANE void weigh(const int queries, float (*scores)[QUAD], ptrdiff_t count, float *state,
                ptrdiff_t step, float *factor)
{
    float before[2 * QUAD] = {0}, most[2 * QUAD], sum[2 * QUAD];
    for (int i = 0; i < queries; i++)
        before[i] = before[i + QUAD] = state[i * step];
    if (count % 2 == 1) /* two keys fill a register */
        _mm_storeu_ps(scores[count], _mm_set1_ps(-INFINITY));
    __m256 largest = _mm256_loadu_ps(before), total = _mm256_setzero_ps();
    for (ptrdiff_t j = 0; j < count; j += 2)
        largest = _mm256_max_ps(largest, _mm256_loadu_ps(scores[j]));
    largest = _mm256_max_ps(largest, _mm256_permute2f128_ps(largest, largest, 1));
    for (ptrdiff_t j = 0; j < count; j += 2) {
        const __m256 weight = lanes_exp(_mm256_sub_ps(_mm256_loadu_ps(scores[j]), largest));
        _mm256_storeu_ps(scores[j], weight);
        total = _mm256_add_ps(total, weight);
    }
    const __m256 kept = lanes_exp(_mm256_sub_ps(_mm256_loadu_ps(before), largest));
    _mm_storeu_ps(factor, _mm256_castps256_ps128(kept));
    _mm256_storeu_ps(most, largest);
    _mm256_storeu_ps(sum, total);
    for (int i = 0; i < queries; i++) {
        state[i * step] = most[i];
        state[i * step + 1] = state[i * step + 1] * factor[i] + (sum[i] + sum[i + QUAD]);
    }
}

/* Up to four queries (constant where inlined, as is `ahead`: whether to prefetch) with a tile. */
LANE void attend_quad(const int queries, const int ahead, const float *q, float *state,
                      ptrdiff_t dim, const Tile *tile)
{
    float scores[TILE][QUAD], factor[QUAD];
    for (ptrdiff_t j = 0; j < tile->count; j += 2) {
        /* An odd last key is taken twice; its second score is put out of the way. */
        const float *next = tile->keys[j + 1 < tile->count ? j + 1 : j];
        two_scores(queries, ahead, q, dim, tile->keys[j], next, scores + j);
    }
    weigh(queries, scores, tile->count, state, STATE + dim, factor);
    for (ptrdiff_t d = 0; d < dim; d += 16) {
        __m256 low[QUAD], high[QUAD];
#pragma GCC unroll 4
        for (int i = 0; i < queries; i++) {
            const float *from = state + i * (STATE + dim) + STATE + d;
            low[i] = _mm256_mul_ps(_mm256_loadu_ps(from), _mm256_set1_ps(factor[i]));
            high[i] = _mm256_mul_ps(_mm256_loadu_ps(from + 8), _mm256_set1_ps(factor[i]));
        }
        for (ptrdiff_t j = 0; j < tile->count; j++) {
            const float *value = tile->values[j] + d;
            if (ahead)
                prefetch(value, dim);
            const __m256 first = _mm256_loadu_ps(value), second = _mm256_loadu_ps(value + 8);
#pragma GCC unroll 4
            for (int i = 0; i < queries; i++) {
                const __m256 weight = _mm256_set1_ps(scores[j][i]);
                low[i] = _mm256_fmadd_ps(weight, first, low[i]);
                high[i] = _mm256_fmadd_ps(weight, second, high[i]);
            }
        }
#pragma GCC unroll 4
        for (int i = 0; i < queries; i++) {
            float *to = state + i * (STATE + dim) + STATE + d;
            _mm256_storeu_ps(to, low[i]);
            _mm256_storeu_ps(to + 8, high[i]);
        }
    }
}

/* q (count, dim), scaled, with a tile; dim is a multiple of 16. */
LANES static void attend_tile(const float *q, float *state, ptrdiff_t count, ptrdiff_t dim,
                              const Tile *tile)
{
    const ptrdiff_t all = count, step = STATE + dim;
    if (count >= 4) {
        attend_quad(4, 1, q, state, dim, tile);
        count -= 4;
    }
    for (; count >= 4; count -= 4)
        attend_quad(4, 0, q + (all - count) * dim, state + (all - count) * step, dim, tile);
    q += (all - count) * dim;
    state += (all - count) * step;
    if (count == 3)
        attend_quad(3, 1, q, state, dim, tile);
    else if (count == 2)
        attend_quad(2, 1, q, state, dim, tile);
    else if (count == 1)
        attend_quad(1, 1, q, state, dim, tile);
}

/* Let `into` also stand for the keys of `other`. */
LANES static void join_states(float *into, const float *other, ptrdiff_t dim)
{
    if (other[1] == 0.0f) /* no keys */
        return;
    const __m256 most = _mm256_set1_ps(fmaxf(into[0], other[0]));
    const __m256 mine = lanes_exp(_mm256_sub_ps(_mm256_set1_ps(into[0]), most));
    const __m256 theirs = lanes_exp(_mm256_sub_ps(_mm256_set1_ps(other[0]), most));
    into[0] = _mm256_cvtss_f32(most);
    into[1] = into[1] * _mm256_cvtss_f32(mine) + other[1] * _mm256_cvtss_f32(theirs);
    for (ptrdiff_t d = STATE; d < STATE + dim; d += 8) {
        const __m256 sum = _mm256_mul_ps(_mm256_loadu_ps(into + d), mine);
        _mm256_storeu_ps(into + d, _mm256_fmadd_ps(_mm256_loadu_ps(other + d), theirs, sum));
    }
}

#endif
