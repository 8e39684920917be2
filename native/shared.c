/* Sums and joins over the ranks of one host, through memory that all of them map.
 *
 * The segment: one counter per rank, 64 bytes apart, in the first page; then two slots per rank. A call writes its part into the
 * slot of its turn's parity, raises its counter to the turn, waits until every counter has come that far, and reads all parts in
 * rank order, so that every rank computes the same bits. Two slots are enough: who writes for turn t + 2 has seen every counter at
 * t + 1, and nobody raises it there before he has read turn t.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <sched.h>
#include <stdint.h>
#include <string.h>
#include <time.h>

#define HEADER 4096
#define APART 64
#define MOST_RANKS (HEADER / APART)

typedef struct {
    uint8_t *base;
    Py_ssize_t capacity;
    int rank, size;
    uint64_t turn;
} Segment;

static uint64_t *counter(const Segment *s, int rank) { return (uint64_t *)(s->base + (size_t)rank * APART); }

static uint8_t *slot(const Segment *s, int rank) {
    return s->base + HEADER + ((size_t)rank * 2 + (s->turn & 1)) * (size_t)s->capacity;
}

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* The first rank that did not come in time, or -1. Spins for a moment, then lets others run. */
static int wait_for_all(const Segment *s, double timeout_s) {
    double ends = 0.0;
    for (int rank = 0; rank < s->size; rank++) {
        for (long tries = 0; __atomic_load_n(counter(s, rank), __ATOMIC_ACQUIRE) < s->turn; tries++) {
            if (tries < 2000) {
#if defined(__x86_64__)
                __builtin_ia32_pause();
#endif
                continue;
            }
            if (tries < 4000) {
                sched_yield();
                continue;
            }
            if (ends == 0.0) ends = now() + timeout_s;
            if (now() > ends) return rank;
            struct timespec nap = {0, 50000};
            nanosleep(&nap, NULL);
        }
    }
    return -1;
}

static int meet(const Segment *s, const void *part, Py_ssize_t bytes, double timeout_s) {
    memcpy(slot(s, s->rank), part, (size_t)bytes);
    __atomic_store_n(counter(s, s->rank), s->turn, __ATOMIC_RELEASE);
    return wait_for_all(s, timeout_s);
}

static void sum_float(const Segment *s, float *into, Py_ssize_t count) {
    memcpy(into, slot(s, 0), (size_t)count * sizeof(float));
    for (int rank = 1; rank < s->size; rank++) {
        const float *part = (const float *)slot(s, rank);
        for (Py_ssize_t i = 0; i < count; i++) into[i] += part[i];
    }
}

static float widened(uint16_t half) {
    uint32_t bits = (uint32_t)half << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static uint16_t narrowed(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return (uint16_t)((bits >> 16) | 0x40);
    return (uint16_t)((bits + 0x7fffu + ((bits >> 16) & 1)) >> 16);
}

static void sum_half(const Segment *s, uint16_t *into, Py_ssize_t count) {
    for (Py_ssize_t i = 0; i < count; i++) {
        float sum = 0.0f;
        for (int rank = 0; rank < s->size; rank++) sum += widened(((const uint16_t *)slot(s, rank))[i]);
        into[i] = narrowed(sum);
    }
}

static int check(const Segment *s, Py_ssize_t segment_bytes, Py_ssize_t part_bytes) {
    const char *wrong = NULL;
    if (s->size < 1 || s->size > MOST_RANKS || s->rank < 0 || s->rank >= s->size) wrong = "no such rank";
    else if (s->capacity < 1 || s->capacity % APART || s->turn < 1) wrong = "no such slot";
    else if (segment_bytes < HEADER || (segment_bytes - HEADER) / s->capacity < 2 * (Py_ssize_t)s->size)
        wrong = "the segment is too small";
    else if ((uintptr_t)s->base % APART) wrong = "the segment is not aligned";
    else if (part_bytes > s->capacity) wrong = "the part is larger than a slot";
    if (wrong != NULL) PyErr_SetString(PyExc_ValueError, wrong);
    return wrong == NULL ? 0 : -1;
}

static PyObject *told(int missing) {
    if (missing < 0) Py_RETURN_NONE;
    return PyLong_FromLong(missing);
}

static PyObject *add(PyObject *self, PyObject *args) {
    (void)self;
    Py_buffer segment, part;
    Segment s;
    unsigned long long turn;
    int half;
    double timeout_s;
    if (!PyArg_ParseTuple(args, "w*niiKw*pd", &segment, &s.capacity, &s.rank, &s.size, &turn, &part, &half, &timeout_s))
        return NULL;
    s.base = segment.buf, s.turn = turn;
    PyObject *answer = NULL;
    Py_ssize_t item = half ? 2 : 4;
    if (check(&s, segment.len, part.len) == 0) {
        if (part.len % item || (uintptr_t)part.buf % (size_t)item) {
            PyErr_SetString(PyExc_ValueError, "the part is no array of that type");
        } else {
            int missing;
            Py_BEGIN_ALLOW_THREADS
            missing = meet(&s, part.buf, part.len, timeout_s);
            if (missing < 0 && half) sum_half(&s, part.buf, part.len / item);
            if (missing < 0 && !half) sum_float(&s, part.buf, part.len / item);
            Py_END_ALLOW_THREADS
            answer = told(missing);
        }
    }
    PyBuffer_Release(&segment);
    PyBuffer_Release(&part);
    return answer;
}

static PyObject *join(PyObject *self, PyObject *args) {
    (void)self;
    Py_buffer segment, part, into;
    Segment s;
    unsigned long long turn;
    Py_ssize_t row;
    double timeout_s;
    if (!PyArg_ParseTuple(args, "w*niiKy*w*nd", &segment, &s.capacity, &s.rank, &s.size, &turn, &part, &into, &row, &timeout_s))
        return NULL;
    s.base = segment.buf, s.turn = turn;
    PyObject *answer = NULL;
    if (check(&s, segment.len, part.len) == 0) {
        if (row < 1 || part.len % row || into.len != part.len * s.size) {
            PyErr_SetString(PyExc_ValueError, "rows that do not fit");
        } else {
            int missing;
            Py_BEGIN_ALLOW_THREADS
            missing = meet(&s, part.buf, part.len, timeout_s);
            uint8_t *to = into.buf;
            for (Py_ssize_t at = 0; missing < 0 && at < part.len; at += row)
                for (int rank = 0; rank < s.size; rank++, to += row) memcpy(to, slot(&s, rank) + at, (size_t)row);
            Py_END_ALLOW_THREADS
            answer = told(missing);
        }
    }
    PyBuffer_Release(&segment);
    PyBuffer_Release(&part);
    PyBuffer_Release(&into);
    return answer;
}

static PyMethodDef methods[] = {
    {"add", add, METH_VARARGS, "Sum of all ranks' parts, in place; the rank that did not come, or None."},
    {"join", join, METH_VARARGS, "All ranks' rows side by side; the rank that did not come, or None."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_shared", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__shared(void) { return PyModule_Create(&module); }
