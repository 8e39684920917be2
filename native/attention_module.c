/* liveweight.engine._attention: store and attend as Python functions.
 *
 * Arrays come as buffers: int64 and int32 as such, floats as float ("f"), bfloat16 as 16-bit integers ("h"). Everything that the
 * kernels trust is checked here, before a byte is touched: types, shapes, strides, rows, positions, and every page that a
 * position leads to. What is wrong is a ValueError. The arrays must not change while a call runs: the GIL is released.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "attention.h"

enum { KEYS, VALUES, STARTS, POSITIONS, TABLES, FIRST, SECOND, ARGUMENTS };

struct kind {
    const char *name, *formats; /* each format is one letter */
    int ndim, flags;
};

enum { PACKED = PyBUF_C_CONTIGUOUS | PyBUF_FORMAT, STRIDED = PyBUF_STRIDES | PyBUF_FORMAT };

static const struct kind STORE[ARGUMENTS] = {
    {"keys", "fh", 4, PACKED | PyBUF_WRITABLE}, {"values", "fh", 4, PACKED | PyBUF_WRITABLE},
    {"starts", "lq", 1, PACKED},                {"positions", "lq", 1, PACKED},
    {"tables", "i", 2, PACKED},                 {"key", "fh", 3, STRIDED},
    {"value", "fh", 3, STRIDED},
};

static const struct kind ATTEND[ARGUMENTS] = {
    {"keys", "fh", 4, PACKED},   {"values", "fh", 4, PACKED},
    {"starts", "lq", 1, PACKED}, {"positions", "lq", 1, PACKED},
    {"tables", "i", 2, PACKED},  {"query", "fh", 3, STRIDED},
    {"out", "fh", 3, PACKED | PyBUF_WRITABLE},
};

/* The arguments of a call, open, and what they mean. */
struct call {
    Py_buffer views[ARGUMENTS];
    int open;
    struct lw_pages pages;
    struct lw_step step;
    struct lw_heads first, second;
};

static void close_call(struct call *call) {
    while (call->open > 0) PyBuffer_Release(&call->views[--call->open]);
}

static int refuse(const char *name, const char *what) {
    PyErr_Format(PyExc_ValueError, "%s %s", name, what);
    return -1;
}

static Py_ssize_t size_of(char format) { return format == 'h' ? 2 : format == 'f' || format == 'i' ? 4 : 8; }

static int is_half(const Py_buffer *view) { return view->format[0] == 'h'; }

static int open_view(PyObject *object, const struct kind *kind, Py_buffer *view) {
    if (PyObject_GetBuffer(object, view, kind->flags) != 0) {
        PyErr_Clear();
        int writes = (kind->flags & PyBUF_WRITABLE) == PyBUF_WRITABLE;
        return refuse(kind->name, writes ? "is no writable array of the kind needed" : "is no array of the kind needed");
    }
    const char *format = view->format;
    int fits = format != NULL && format[0] != '\0' && format[1] == '\0' && strchr(kind->formats, format[0]) != NULL;
    fits = fits && view->itemsize == size_of(format[0]) && view->ndim == kind->ndim;
    fits = fits && view->suboffsets == NULL && (uintptr_t)view->buf % (size_t)view->itemsize == 0;
    for (int i = 0; fits && i < view->ndim; i++) fits = view->strides[i] % view->itemsize == 0;
    if (fits) return 0;
    PyErr_Format(PyExc_ValueError, "%s is no aligned array of %d dimensions and a type that fits", kind->name, kind->ndim);
    PyBuffer_Release(view);
    return -1;
}

static int read_pages(struct call *call) {
    const Py_buffer *keys = &call->views[KEYS], *values = &call->views[VALUES];
    struct lw_pages *pages = &call->pages;
    *pages = (struct lw_pages){keys->buf,        values->buf,      values->shape[0], values->shape[1],
                               values->shape[2], values->shape[3], is_half(values)};
    int same = keys->shape[0] == pages->blocks && keys->shape[1] == pages->kv_heads && keys->shape[2] == pages->dim &&
               keys->shape[3] == pages->block_tokens && is_half(keys) == pages->half;
    if (!same) return refuse("keys", "are not of the values' type and shape, with the last two dimensions exchanged");
    if (pages->kv_heads < 1 || pages->block_tokens < 1 || pages->dim < 1) return refuse("values", "have pages of nothing");
    return pages->dim > LW_MAX_DIM ? refuse("values", "have more dimensions per head than are supported") : 0;
}

/* One row: its tokens' positions lie in its table, and the pages up to the last of them exist. */
static int check_row(const struct call *call, int64_t row) {
    const struct lw_step *step = &call->step;
    int64_t longest = -1, tokens = call->pages.block_tokens;
    for (int64_t token = step->starts[row]; token < step->starts[row + 1]; token++) {
        int64_t position = step->positions[token];
        if (position < 0 || position / tokens >= step->table_blocks) {
            PyErr_Format(PyExc_ValueError, "position %lld of token %lld is beyond its table of %lld blocks", (long long)position,
                         (long long)token, (long long)step->table_blocks);
            return -1;
        }
        if (position > longest) longest = position;
    }
    const int32_t *table = step->tables + row * step->table_blocks;
    for (int64_t i = 0; longest >= 0 && i <= longest / tokens; i++) {
        if (table[i] >= 0 && table[i] < call->pages.blocks) continue;
        PyErr_Format(PyExc_ValueError, "row %lld has block %d of %lld", (long long)row, (int)table[i],
                     (long long)call->pages.blocks);
        return -1;
    }
    return 0;
}

static int read_step(struct call *call) {
    const Py_buffer *starts = &call->views[STARTS], *positions = &call->views[POSITIONS], *tables = &call->views[TABLES];
    struct lw_step *step = &call->step;
    *step = (struct lw_step){starts->buf,          positions->buf,      tables->buf,
                             starts->shape[0] - 1, positions->shape[0], tables->shape[1]};
    if (step->rows < 0 || tables->shape[0] != step->rows) return refuse("starts", "are not one more than the tables");
    if (step->starts[0] != 0 || step->starts[step->rows] != step->tokens) return refuse("starts", "do not cover the tokens");
    for (int64_t row = 0; row < step->rows; row++)
        if (step->starts[row] > step->starts[row + 1]) return refuse("starts", "go backwards");
    for (int64_t row = 0; row < step->rows; row++)
        if (check_row(call, row) != 0) return -1;
    return 0;
}

static int read_heads(const struct call *call, int which, const char *name, struct lw_heads *heads) {
    const Py_buffer *view = &call->views[which];
    Py_ssize_t item = view->itemsize;
    *heads = (struct lw_heads){view->buf, view->strides[0] / item, view->strides[1] / item, view->shape[1], is_half(view)};
    if (view->shape[0] != call->step.tokens || view->shape[2] != call->pages.dim)
        return refuse(name, "is not [tokens, heads, dim] of this step and cache");
    if (view->strides[2] != item && view->shape[2] != 1) return refuse(name, "does not have the items of a head side by side");
    return 0;
}

/* What is written must not lie over what the checks were made on. */
static int check_apart(const struct call *call, const struct kind *kinds) {
    for (int i = 0; i < ARGUMENTS; i++) {
        const char *written = call->views[i].buf;
        for (int j = STARTS; (kinds[i].flags & PyBUF_WRITABLE) == PyBUF_WRITABLE && j <= TABLES; j++) {
            const char *read = call->views[j].buf;
            if (written < read + call->views[j].len && read < written + call->views[i].len)
                return refuse(kinds[j].name, "lie where the call writes");
        }
    }
    return 0;
}

static int open_call(PyObject *const *objects, const struct kind *kinds, struct call *call) {
    for (call->open = 0; call->open < ARGUMENTS; call->open++)
        if (open_view(objects[call->open], &kinds[call->open], &call->views[call->open]) != 0) return -1;
    if (check_apart(call, kinds) != 0 || read_pages(call) != 0 || read_step(call) != 0) return -1;
    if (read_heads(call, FIRST, kinds[FIRST].name, &call->first) != 0) return -1;
    return read_heads(call, SECOND, kinds[SECOND].name, &call->second);
}

static PyObject *native_store(PyObject *self, PyObject *args) {
    PyObject *o[ARGUMENTS];
    struct call call = {.open = 0};
    int done = 0;
    (void)self;
    if (!PyArg_ParseTuple(args, "OOOOOOO:store", &o[0], &o[1], &o[2], &o[3], &o[4], &o[5], &o[6])) return NULL;
    if (open_call(o, STORE, &call) == 0) {
        if (call.first.heads != call.pages.kv_heads || call.second.heads != call.pages.kv_heads) {
            refuse("key and value", "do not have the cache's heads");
        } else {
            Py_BEGIN_ALLOW_THREADS;
            lw_store(&call.pages, &call.step, &call.first, &call.second);
            Py_END_ALLOW_THREADS;
            done = 1;
        }
    }
    close_call(&call);
    if (done) Py_RETURN_NONE;
    return NULL;
}

static PyObject *native_attend(PyObject *self, PyObject *args) {
    PyObject *o[ARGUMENTS];
    struct call call = {.open = 0};
    int portable = 0, done = 0, failed = 0;
    (void)self;
    if (!PyArg_ParseTuple(args, "OOOOOOO|p:attend", &o[0], &o[1], &o[2], &o[3], &o[4], &o[5], &o[6], &portable)) return NULL;
    if (open_call(o, ATTEND, &call) == 0) {
        const struct lw_attention_simd *simd = portable ? &lw_attention_portable : lw_attention_best(call.pages.dim);
        if (call.first.heads != call.second.heads || call.first.heads % call.pages.kv_heads != 0) {
            refuse("query and out", "do not have the same heads, a multiple of the cache's");
        } else {
            Py_BEGIN_ALLOW_THREADS;
            failed = lw_attend(&call.pages, &call.step, &call.first, &call.second, simd);
            Py_END_ALLOW_THREADS;
            done = !failed;
            if (failed) PyErr_NoMemory();
        }
    }
    close_call(&call);
    if (done) Py_RETURN_NONE;
    return NULL;
}

static PyObject *native_simd(PyObject *self, PyObject *args) {
    long long dim;
    (void)self;
    if (!PyArg_ParseTuple(args, "L:simd", &dim)) return NULL;
    return PyUnicode_FromString(lw_attention_best(dim)->name);
}

static PyMethodDef methods[] = {
    {"store", native_store, METH_VARARGS, "store(keys, values, starts, positions, tables, key, value)"},
    {"attend", native_attend, METH_VARARGS, "attend(keys, values, starts, positions, tables, query, out, portable=False)"},
    {"simd", native_simd, METH_VARARGS, "simd(dim): the name of the instruction set in use for heads of so many dimensions."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_attention", "C kernels: attention over a paged cache.", -1, methods,
                                    NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__attention(void) { return PyModule_Create(&module); }
