/* What a draft step makes of its logits: of each row the likeliest tokens, its log of the sum of
 * exponentials, and its entropy, in two passes over the row.
 */
#include "products.h"

#if defined(__x86_64__) && defined(__GNUC__)

#include <math.h>
#include <string.h>

#include "float_lanes.h"

/* The `count` largest of a row, falling, the lowest index first among equals; -inf is none. */
LANES static ptrdiff_t largest(const float *row, ptrdiff_t vocab, ptrdiff_t count, float *values,
                               int64_t *tokens)
{
    ptrdiff_t found = 0;
    float bar = -INFINITY;
    for (ptrdiff_t i = 0; i < vocab; i += 8) {
        const ptrdiff_t left = vocab - i;
        int above = 255;
        if (left >= 8)
            above = _mm256_movemask_ps(
                _mm256_cmp_ps(_mm256_loadu_ps(row + i), _mm256_set1_ps(bar), _CMP_GT_OQ));
        for (ptrdiff_t j = i; above != 0 && j < i + 8 && j < vocab; j++) {
            if (!(row[j] > bar))
                continue;
            ptrdiff_t place = found < count ? found++ : count - 1;
            for (; place > 0 && values[place - 1] < row[j]; place--) {
                values[place] = values[place - 1];
                tokens[place] = tokens[place - 1];
            }
            values[place] = row[j];
            tokens[place] = j;
            bar = found < count ? -INFINITY : values[count - 1];
        }
    }
    return found;
}

/* sums: log of the sum of e^(factor * x) over a row, and the entropy, where most is max x. */
LANES static void sum_up(const float *row, ptrdiff_t vocab, double factor, float most, double *sums)
{
    const __m256 scale = _mm256_set1_ps((float)factor);
    const __m256 shift = _mm256_set1_ps((float)factor * most);
    const __m256 least = _mm256_set1_ps(-100.0f); /* e^-100 is 0 here, and 0 * -inf NaN */
    double total = 0.0, weighed = 0.0;
    for (ptrdiff_t i = 0; i < vocab;) {
        /* In parts, so that float32 sums stay short. */
        const ptrdiff_t stop = vocab - i < 4096 ? vocab : i + 4096;
        __m256 sum = _mm256_setzero_ps(), product = _mm256_setzero_ps();
        for (; i < stop; i += 8) {
            float last[8];
            const float *from = row + i;
            if (stop - i < 8) {
                for (ptrdiff_t j = 0; j < 8; j++)
                    last[j] = j < stop - i ? from[j] : -INFINITY;
                from = last;
            }
            __m256 x = _mm256_fmsub_ps(_mm256_loadu_ps(from), scale, shift);
            x = _mm256_max_ps(least, x);
            const __m256 weight = lanes_exp(x);
            sum = _mm256_add_ps(sum, weight);
            product = _mm256_fmadd_ps(weight, x, product);
        }
        total += lanes_sum(sum);
        weighed += lanes_sum(product);
    }
    const double rest = log(total);
    sums[0] = factor * most + rest;
    sums[1] = rest - weighed / total;
}

/* outlook(scores, rows, vocab, factor, count, values, tokens, sums): addresses of scores (rows,
 * vocab) float32; of the likeliest `count` of scores * factor, values (rows, count) float32 as
 * log-probabilities and tokens int64; of sums (rows, 2) float64. What there is not is NaN. */
PyObject *outlook(PyObject *self, PyObject *const *given, Py_ssize_t arguments)
{
    size_t value[8] = {0};
    (void)self;
    if (arguments != 8)
        return PyErr_Format(PyExc_TypeError, "eight numbers are needed");
    const double factor = PyFloat_AsDouble(given[3]);
    for (int i = 0; i < 8 && !PyErr_Occurred(); i++)
        if (i != 3)
            value[i] = PyLong_AsSize_t(given[i]);
    if (PyErr_Occurred())
        return NULL;
    const ptrdiff_t rows = (ptrdiff_t)value[1], vocab = (ptrdiff_t)value[2];
    const ptrdiff_t count = (ptrdiff_t)value[4];
    if (count < 1 || count > vocab)
        return PyErr_Format(PyExc_ValueError, "%zd tokens of %zd were asked for", count, vocab);
    Py_BEGIN_ALLOW_THREADS
    for (ptrdiff_t r = 0; r < rows; r++) {
        const float *row = (const float *)value[0] + r * vocab;
        float *values = (float *)value[5] + r * count;
        int64_t *tokens = (int64_t *)value[6] + r * count;
        double *sums = (double *)value[7] + 2 * r;
        const ptrdiff_t found = largest(row, vocab, count, values, tokens);
        if (found > 0 && isfinite(values[0]))
            sum_up(row, vocab, factor, values[0], sums);
        else
            sums[0] = sums[1] = NAN;
        for (ptrdiff_t i = 0; i < count; i++) {
            /* Rounding must not make it more than certain: a child is at most as likely. */
            const double log_prob = factor * values[i] - sums[0];
            values[i] = i < found ? (float)(log_prob > 0.0 ? 0.0 : log_prob) : NAN;
            tokens[i] = i < found ? tokens[i] : 0;
        }
    }
    Py_END_ALLOW_THREADS
    return Py_NewRef(Py_None);
}

#endif
