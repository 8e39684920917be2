/* liveweight.devices._native: the kernels as Python functions.
 *
 * Each executes rows [first, last) of an int64 table whose offsets were turned into addresses (devices/native_kernels.py), with the GIL
 * released. Checked here: types, shapes and ranges of the arguments. What a row points at is the caller's promise.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdlib.h>
#include <string.h>

#include "kernels.h"

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "units are little-endian"
#endif

struct table {
    Py_buffer view;
    const int64_t *rows;
    Py_ssize_t count;
};

static int open_table(PyObject *object, Py_ssize_t columns, Py_ssize_t first, Py_ssize_t last, struct table *table) {
    if (PyObject_GetBuffer(object, &table->view, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT) != 0) return -1;
    const Py_buffer *view = &table->view;
    int fits = view->ndim == 2 && view->itemsize == 8 && view->shape[1] == columns;
    fits = fits && view->format != NULL && (strcmp(view->format, "l") == 0 || strcmp(view->format, "q") == 0);
    if (!fits || (uintptr_t)view->buf % 8 != 0) {
        PyErr_Format(PyExc_ValueError, "a table is a C-contiguous, aligned int64 array of shape (rows, %zd)", columns);
    } else if (first < 0 || last < first || last > view->shape[0]) {
        PyErr_Format(PyExc_ValueError, "rows %zd to %zd of a table of %zd", first, last, view->shape[0]);
    } else {
        table->rows = (const int64_t *)view->buf + first * columns;
        table->count = last - first;
        return 0;
    }
    PyBuffer_Release(&table->view);
    return -1;
}

static int open_lanes(PyObject *object, const struct table *table, Py_ssize_t columns, Py_buffer *view) {
    if (PyObject_GetBuffer(object, view, PyBUF_C_CONTIGUOUS | PyBUF_WRITABLE | PyBUF_FORMAT) != 0) return -1;
    int fits = view->ndim == 2 && view->itemsize == 4 && view->shape[1] == LW_SEEDS && (uintptr_t)view->buf % 4 == 0;
    fits = fits && view->format != NULL && strcmp(view->format, "I") == 0;
    if (!fits) PyErr_Format(PyExc_ValueError, "lanes are a writable, C-contiguous uint32 array of shape (slots, %d)", LW_SEEDS);
    for (Py_ssize_t i = 0; fits && i < table->count; i++) {
        int64_t slot = ((const struct lw_rectangle *)(const void *)(table->rows + i * columns))->slot;
        fits = slot >= 0 && slot < view->shape[0];
        if (!fits) PyErr_Format(PyExc_ValueError, "slot %lld of %zd", (long long)slot, view->shape[0]);
    }
    if (!fits) PyBuffer_Release(view);
    return fits ? 0 : -1;
}

static const struct lw_simd *chosen(int portable) { return portable ? &lw_portable : lw_best(); }

static void run_rectangles(const struct table *table, Py_ssize_t columns, uint32_t *lanes, const struct lw_simd *simd,
                           struct lw_scratch *scratch) {
    int64_t total = 0;
    for (Py_ssize_t i = 0; i < table->count; i++) {
        const struct lw_rectangle *r = (const struct lw_rectangle *)(const void *)(table->rows + i * columns);
        total += r->rows * r->columns * r->item_bytes;
    }
    scratch->stream = total >= LW_STREAM_BYTES;
    for (Py_ssize_t i = 0; i < table->count; i++) {
        struct lw_rectangle rectangle = {0};
        memcpy(&rectangle, table->rows + i * columns, (size_t)columns * sizeof(int64_t));
        lw_rectangle_run(&rectangle, simd, scratch, lanes == NULL ? NULL : lanes + rectangle.slot * LW_SEEDS);
    }
    simd->fence();
}

static PyObject *execute(const struct table *table, Py_ssize_t columns, uint32_t *lanes, int portable) {
    struct lw_scratch *scratch = aligned_alloc(64, sizeof *scratch);
    if (scratch == NULL) return PyErr_NoMemory();
    const struct lw_simd *simd = chosen(portable);
    if (lanes != NULL) lw_prepare(table->rows, (size_t)columns, (size_t)table->count);
    Py_BEGIN_ALLOW_THREADS;
    run_rectangles(table, columns, lanes, simd, scratch);
    Py_END_ALLOW_THREADS;
    free(scratch);
    Py_RETURN_NONE;
}

static PyObject *rectangles(PyObject *args, const char *format, Py_ssize_t columns) {
    PyObject *rows, *lanes, *result = NULL;
    Py_ssize_t first, last;
    int portable = 0;
    struct table table;
    Py_buffer view;
    if (!PyArg_ParseTuple(args, format, &rows, &first, &last, &lanes, &portable)) return NULL;
    if (open_table(rows, columns, first, last, &table) != 0) return NULL;
    if (lanes == Py_None && columns == LW_FREEZE_COLUMNS) {
        result = execute(&table, columns, NULL, portable);
    } else if (open_lanes(lanes, &table, columns, &view) == 0) {
        result = execute(&table, columns, view.buf, portable);
        PyBuffer_Release(&view);
    }
    PyBuffer_Release(&table.view);
    return result;
}

static PyObject *native_digest(PyObject *self, PyObject *args) {
    (void)self;
    return rectangles(args, "OnnO|p:digest", LW_DIGEST_COLUMNS);
}

static PyObject *native_freeze(PyObject *self, PyObject *args) {
    (void)self;
    return rectangles(args, "OnnO|p:freeze", LW_FREEZE_COLUMNS);
}

static PyObject *native_copy(PyObject *self, PyObject *args) {
    PyObject *rows;
    Py_ssize_t first, last;
    int portable = 0;
    struct table table;
    (void)self;
    if (!PyArg_ParseTuple(args, "Onn|p:copy", &rows, &first, &last, &portable)) return NULL;
    if (open_table(rows, LW_COPY_COLUMNS, first, last, &table) != 0) return NULL;
    const struct lw_simd *simd = chosen(portable);
    Py_BEGIN_ALLOW_THREADS;
    const struct lw_copy *copies = (const struct lw_copy *)(const void *)table.rows;
    int64_t total = 0;
    for (Py_ssize_t i = 0; i < table.count; i++) total += copies[i].outer * copies[i].inner * copies[i].chunk_bytes;
    for (Py_ssize_t i = 0; i < table.count; i++) lw_copy_row(copies + i, simd, total >= LW_STREAM_BYTES);
    simd->fence();
    Py_END_ALLOW_THREADS;
    PyBuffer_Release(&table.view);
    Py_RETURN_NONE;
}

static PyObject *native_simd(PyObject *self, PyObject *args) {
    (void)self;
    (void)args;
    return PyUnicode_FromString(lw_best()->name);
}

static PyMethodDef methods[] = {
    {"copy", native_copy, METH_VARARGS, "copy(table, first, last, portable=False)"},
    {"digest", native_digest, METH_VARARGS, "digest(table, first, last, lanes, portable=False): adds to lanes"},
    {"freeze", native_freeze, METH_VARARGS, "freeze(table, first, last, lanes or None, portable=False): None only moves"},
    {"simd", native_simd, METH_NOARGS, "The name of the instruction set in use."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_native", "C kernels: copy, digest, freeze.", -1, methods,
                                    NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__native(void) { return PyModule_Create(&module); }
