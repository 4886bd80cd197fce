/* stages._draft: a few rows of activations times a matrix of low-bit weights, on x86-64.
 *
 * A row's activations become int8, 64 of them to a scale, so that the products of a group are
 * exact integers and only the sum over groups is in floating point. With q the activations' codes
 * and s their scale, c the weights' codes: a group adds
 *     intN    s * scale * (sum(q * c) - half * sum(q)) + s * sum(q) * offset  c in 0..2 * half - 1
 *     int8    s * sum(q * (c - 128)), and the whole sum is times a row's scale
 *     nf4     s * scale * sum(q * level[c])                                   c in 0..15
 * where intN is int6, int4, int3 or int2. nf4's levels are rounded to whole numbers of up to 127, and its
 * scale is a 127th of the group's largest weight.
 * The weights come in blocks of 8 outputs, a block in groups of 64 columns, a group's columns in
 * sets of 4. A group's codes are planes of b bits each, in vectors of 32 bytes: byte [output][i]
 * has column i of 8 / b sets, the first set in the lowest bits. There is one plane (of 8 bits for
 * int8), but two for int3 and int6: the codes' low 2 (4) bits, then their high ones. Behind a group's codes
 * stand, for intN, 8 scales and 8 offsets in bfloat16, for nf4 8 scales in float32; int8's rows'
 * scales stand behind the last block, in bfloat16.
 * Compiled for any x86-64; what the processor has is asked as the module is loaded. The module's
 * other functions are in draft_layers.c and outlook.c; they need what the products need.
 */
#define _GNU_SOURCE
#include "products.h"

#if defined(__x86_64__) && defined(__GNUC__)

#include <dlfcn.h>
#include <immintrin.h>
#include <stdlib.h>
#include <string.h>

enum { GROUP = 64, BLOCK = 8, PASS_ROWS = 64 };

/* Bytes ahead of the weights in use that are asked for. A processor follows a run of addresses by
 * itself only to the end of a page, and too late for one thread to read as fast as memory gives. */
enum { AHEAD = 6144 };

typedef struct {
    float scale;   /* of the codes */
    float sum;     /* of what the codes stand for */
    int32_t mend;  /* what the weights' bias adds to a sum of products, undone */
} Part;

typedef struct Work {
    const uint8_t *weights;
    ptrdiff_t groups, blocks, outputs, rows;
    int8_t *codes; /* [rows][groups][64] */
    Part *parts;   /* [rows][groups] */
    float *out;    /* [rows][outputs] */
    int bias;
    void (*multiply)(const struct Work *, ptrdiff_t, ptrdiff_t);
} Work;

#include "product_forms.h"

/* 64 activations as codes. A group with one that is not finite gets the scale NaN. */
AVX2 static void quantize(const float *x, int8_t *codes, Part *part)
{
    __m256i most = _mm256_setzero_si256(), total = _mm256_setzero_si256(), c[4];
    int32_t lanes[8], bits = 0, sum = 0;
    float largest;

    /* Floats without their signs are ordered as integers are, NaN above infinity. */
    for (int i = 0; i < GROUP; i += 8) {
        const __m256i value = _mm256_loadu_si256((const __m256i *)(x + i));
        most = _mm256_max_epi32(most, _mm256_and_si256(value, _mm256_set1_epi32(0x7fffffff)));
    }
    _mm256_storeu_si256((__m256i *)lanes, most);
    for (int i = 0; i < 8; i++)
        bits = lanes[i] > bits ? lanes[i] : bits;
    memcpy(&largest, &bits, sizeof bits);
    if (bits >= 0x7f800000 || largest < 1e-36f) { /* below it, 127 / largest overflows */
        memset(codes, 0, GROUP);
        part->mend = 0;
        part->scale = part->sum = bits >= 0x7f800000 ? __builtin_nanf("") : 0.0f;
        return;
    }
    const __m256 factor = _mm256_set1_ps(127.0f / largest);
    for (int half = 0; half < 2; half++) {
        for (int i = 0; i < 4; i++) {
            const __m256 value = _mm256_loadu_ps(x + 32 * half + 8 * i);
            c[i] = _mm256_cvtps_epi32(_mm256_mul_ps(value, factor));
            total = _mm256_add_epi32(total, c[i]);
        }
        const __m256i low = _mm256_packs_epi32(c[0], c[1]), high = _mm256_packs_epi32(c[2], c[3]);
        const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
        _mm256_storeu_si256((__m256i *)(codes + 32 * half),
                            _mm256_permutevar8x32_epi32(_mm256_packs_epi16(low, high), order));
    }
    _mm256_storeu_si256((__m256i *)lanes, total);
    for (int i = 0; i < 8; i++)
        sum += lanes[i];
    part->mend = sum; /* for a bias of -1 */
    part->scale = largest / 127.0f;
    part->sum = part->scale * (float)sum;
}

static void quantize_rows(Work *work, const float *x, ptrdiff_t cols)
{
    for (ptrdiff_t r = 0; r < work->rows; r++, x += cols) {
        for (ptrdiff_t g = 0; g < work->groups; g++) {
            const ptrdiff_t at = r * work->groups + g, left = cols - g * GROUP;
            float whole[GROUP] = {0};
            if (left < GROUP)
                memcpy(whole, x + g * GROUP, (size_t)left * sizeof(float));
            quantize(left < GROUP ? whole : x + g * GROUP, work->codes + at * GROUP,
                     work->parts + at);
            work->parts[at].mend *= -work->bias;
        }
    }
}

/* torch's own OpenMP, found as we are loaded: another one beside it would double the threads. */
static void (*parallel)(void (*)(void *), void *, unsigned, unsigned);
static int (*thread_index)(void), (*thread_count)(void), (*thread_limit)(void);
typedef void (*const Multiplies[FORMS])(const Work *, ptrdiff_t, ptrdiff_t);
static const Multiplies with_avx2 = {
    [INT4] = multiply_int4_avx2, [INT8] = multiply_int8_avx2, [NF4] = multiply_nf4_avx2,
    [INT3] = multiply_int3_avx2, [INT2] = multiply_int2_avx2, [INT6] = multiply_int6_avx2};
static const Multiplies with_vnni = {
    [INT4] = multiply_int4_vnni, [INT8] = multiply_int8_vnni, [NF4] = multiply_nf4_vnni,
    [INT3] = multiply_int3_vnni, [INT2] = multiply_int2_vnni, [INT6] = multiply_int6_vnni};
static const Multiplies *best;
/* What codes are more than what they stand for, wherever products take them as they are. */
static const int biases[FORMS] = {[INT4] = 8, [INT8] = 128, [NF4] = 128,
                                  [INT3] = 4, [INT2] = 2,   [INT6] = 32};
static const char *best_name;

/* The calling thread is a team of its own outside a parallel run, also without OpenMP. */
ptrdiff_t team_index(void) { return parallel == NULL ? 0 : thread_index(); }
ptrdiff_t team_count(void) { return parallel == NULL ? 1 : thread_count(); }

void team_run(void (*share)(void *), void *argument, ptrdiff_t work, ptrdiff_t most)
{
    const ptrdiff_t worth = work / WORTH;
    ptrdiff_t threads = parallel == NULL || worth < 2 ? 1 : thread_limit();
    threads = threads < worth ? threads : worth;
    threads = threads < most ? threads : most;
    if (threads > 1)
        parallel(share, argument, (unsigned)threads, 0);
    else
        share(argument);
}

static void share(void *argument)
{
    const Work *work = argument;
    const ptrdiff_t index = team_index(), count = team_count();
    work->multiply(work, work->blocks * index / count, work->blocks * (index + 1) / count);
}

size_t product_room(ptrdiff_t rows, ptrdiff_t cols)
{
    const ptrdiff_t most = rows < PASS_ROWS ? rows : PASS_ROWS;
    const ptrdiff_t parts = most * ((cols + GROUP - 1) / GROUP);
    return (size_t)parts * (sizeof(Part) + GROUP) + 1;
}

void multiply(const Matrix *matrix, const float *x, float *out, ptrdiff_t rows, ptrdiff_t cols,
              ptrdiff_t outputs, void *room)
{
    const ptrdiff_t most = rows < PASS_ROWS ? rows : PASS_ROWS;
    Work work = {.weights = matrix->weights, .outputs = outputs, .out = out};
    work.multiply = (*best)[matrix->form];
    work.bias = biases[matrix->form];
    work.groups = (cols + GROUP - 1) / GROUP;
    work.blocks = (outputs + BLOCK - 1) / BLOCK;
    work.parts = room;
    work.codes = (int8_t *)(work.parts + most * work.groups);
    for (; rows > 0; rows -= work.rows) {
        work.rows = rows < most ? rows : most;
        quantize_rows(&work, x, cols);
        team_run(share, &work, work.rows * work.outputs * work.groups * GROUP, PTRDIFF_MAX);
        x += work.rows * cols;
        work.out += work.rows * work.outputs;
    }
}

static PyObject *product(PyObject *self, PyObject *const *given, Py_ssize_t count)
{
    size_t value[7];
    void *room;

    (void)self;
    if (count != 7 || best == NULL)
        return PyErr_Format(PyExc_TypeError, "seven numbers, and a fitting processor, are needed");
    for (int i = 0; i < 7; i++)
        if ((value[i] = PyLong_AsSize_t(given[i])) == (size_t)-1 && PyErr_Occurred())
            return NULL;
    if (value[0] >= FORMS)
        return PyErr_Format(PyExc_ValueError, "form %zu given, less than %d expected", value[0],
                            FORMS);
    const Matrix matrix = {.form = (int64_t)value[0], .weights = (const uint8_t *)value[1]};
    const ptrdiff_t rows = (ptrdiff_t)value[4], cols = (ptrdiff_t)value[5];
    if ((room = malloc(product_room(rows, cols))) == NULL)
        return PyErr_NoMemory();
    Py_BEGIN_ALLOW_THREADS
    multiply(&matrix, (const float *)value[2], (float *)value[3], rows, cols, (ptrdiff_t)value[6],
             room);
    Py_END_ALLOW_THREADS
    free(room);
    return Py_NewRef(Py_None);
}

/* Out of every cache, so that what is timed next reads it from memory, as a step of a whole model
 * does. Reading much else instead is no certain way: a cache may be larger than one can know. */
static PyObject *evict(PyObject *self, PyObject *const *given, Py_ssize_t count)
{
    enum { LINE = 64 };
    size_t value[2];

    (void)self;
    if (count != 2)
        return PyErr_Format(PyExc_TypeError, "an address and a size are needed");
    for (int i = 0; i < 2; i++)
        if ((value[i] = PyLong_AsSize_t(given[i])) == (size_t)-1 && PyErr_Occurred())
            return NULL;
    for (size_t at = value[0] & -(size_t)LINE; at < value[0] + value[1]; at += LINE)
        _mm_clflush((const void *)at);
    _mm_mfence();
    return Py_NewRef(Py_None);
}

static const char *prepare(void)
{
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma"))
        return NULL;
    if (__builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni")) {
        best = &with_vnni;
        best_name = "AVX-512 VNNI";
    } else {
        best = &with_avx2;
        best_name = "AVX2";
    }
    *(void **)&thread_index = dlsym(RTLD_DEFAULT, "omp_get_thread_num");
    *(void **)&thread_count = dlsym(RTLD_DEFAULT, "omp_get_num_threads");
    *(void **)&thread_limit = dlsym(RTLD_DEFAULT, "omp_get_max_threads");
    if (thread_index != NULL && thread_count != NULL && thread_limit != NULL)
        *(void **)&parallel = dlsym(RTLD_DEFAULT, "GOMP_parallel");
    return best_name;
}

/* For tests: hold the products to plain AVX2. */
static PyObject *plain(PyObject *self, PyObject *yes)
{
    (void)self;
    const int wanted = PyObject_IsTrue(yes);
    if (wanted < 0)
        return NULL;
    prepare();
    if (wanted && best != NULL) {
        best = &with_avx2;
        best_name = "AVX2";
    }
    return Py_NewRef(Py_None);
}

#else

static const char *best_name;

static const char *prepare(void) { return NULL; }

static PyObject *product(PyObject *self, PyObject *const *given, Py_ssize_t count)
{
    return PyErr_Format(PyExc_NotImplementedError, "not for this processor or compiler");
}

static PyObject *plain(PyObject *self, PyObject *yes) { return product(self, NULL, 0); }

static PyObject *evict(PyObject *self, PyObject *const *given, Py_ssize_t count)
{
    return product(self, given, count);
}

PyObject *draft_room(PyObject *self, PyObject *const *given, Py_ssize_t count)
{
    return product(self, given, count);
}

PyObject *draft_layers(PyObject *self, PyObject *const *given, Py_ssize_t count)
{
    return product(self, given, count);
}

PyObject *outlook(PyObject *self, PyObject *const *given, Py_ssize_t count)
{
    return product(self, given, count);
}

#endif

static PyObject *available(PyObject *self, PyObject *unused)
{
    (void)self, (void)unused;
    return best_name == NULL ? Py_NewRef(Py_None) : PyUnicode_FromString(best_name);
}

#define FAST(function) (PyCFunction)(void (*)(void))function, METH_FASTCALL

static PyMethodDef methods[] = {
    {"available", available, METH_NOARGS, "The instructions in use; None if it cannot run here."},
    {"product", FAST(product),
     "product(form, weights, x, out, rows, cols, outputs): three addresses, three sizes."},
    {"evict", FAST(evict), "evict(address, nbytes): what lies there leaves every cache."},
    {"draft_room", FAST(draft_room), "draft_room(layers, rows): the bytes that a step needs."},
    {"draft_layers", FAST(draft_layers), "draft_layers(layers, step): see draft_layers.c."},
    {"outlook", FAST(outlook),
     "outlook(scores, rows, vocab, factor, count, values, tokens, sums): see outlook.c."},
    {"plain", plain, METH_O, "plain(True) holds the products to AVX2, for tests; False undoes it."},
    {NULL, NULL, 0, NULL},
};

static int start(PyObject *module)
{
    prepare();
    /* To be raised with every change of what Python calls; see compiled.py. */
    return PyModule_AddIntConstant(module, "INTERFACE", 6);
}

static PyModuleDef_Slot slots[] = {{Py_mod_exec, (void *)start}, {0, NULL}};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "stages._draft", "What a drafter computes, on low-bit weights.",
    0, methods, slots, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__draft(void);
PyMODINIT_FUNC PyInit__draft(void) { return PyModuleDef_Init(&definition); }
