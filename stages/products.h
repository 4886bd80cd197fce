/* What the compiled part's files have of each other. Everything is as on x86-64 with AVX2. */
#ifndef PRODUCTS_H
#define PRODUCTS_H

#define Py_LIMITED_API 0x030B0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stddef.h>
#include <stdint.h>

#if defined(__x86_64__) && defined(__GNUC__)

#define HIDDEN __attribute__((visibility("hidden")))

/* What a thread must have to do (multiplications) to be worth waking. */
#define WORTH 500000

/* Forms of weights, as compiled.py numbers them. Macros, as the preprocessor asks for them. */
#define INT4 0
#define INT8 1
#define NF4 2
#define INT3 3
#define INT2 4
#define INT6 5
#define FORMS 6

/* A packed matrix: see products.c. */
typedef struct {
    const uint8_t *weights;
    int64_t form;
} Matrix;

/* Bytes that a product needs beside its operands. */
HIDDEN size_t product_room(ptrdiff_t rows, ptrdiff_t cols);

/* x (rows, cols) times `matrix` -> out (rows, outputs). `room`: aligned to 8 bytes. */
HIDDEN void multiply(const Matrix *matrix, const float *x, float *out, ptrdiff_t rows,
                     ptrdiff_t cols, ptrdiff_t outputs, void *room);

/* Run `share` on as many of torch's threads as `work` multiplications are worth, at most `most`.
 * `share` asks team_index and team_count. */
HIDDEN void team_run(void (*share)(void *), void *argument, ptrdiff_t work, ptrdiff_t most);
HIDDEN ptrdiff_t team_index(void);
HIDDEN ptrdiff_t team_count(void);

#endif

/* Of draft_layers.c and outlook.c: see the table of methods in products.c. */
PyObject *draft_room(PyObject *self, PyObject *const *given, Py_ssize_t count);
PyObject *draft_layers(PyObject *self, PyObject *const *given, Py_ssize_t count);
PyObject *outlook(PyObject *self, PyObject *const *given, Py_ssize_t count);

#endif
