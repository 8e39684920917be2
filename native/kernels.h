/* The kernels' shared nouns.
 *
 * module.c checks arguments and releases the GIL; copy.c and digest.c walk the rows of tables; avx2.c and portable.c do the
 * inner work, in one shape each: struct lw_simd. No kernel checks a bound: the tables were checked when they were bound
 * (devices/bounds.py). The meaning of a digest is spec/digest.py's; these give the same bits.
 */
#ifndef LIVEWEIGHT_KERNELS_H
#define LIVEWEIGHT_KERNELS_H

#include <stddef.h>
#include <stdint.h>

#if defined(__x86_64__) && defined(__GNUC__)
#define LW_X86 1
#else
#define LW_X86 0
#endif

enum {
    LW_SEEDS = 4,
    LW_COPY_COLUMNS = 11,
    LW_DIGEST_COLUMNS = 12,
    LW_FREEZE_COLUMNS = 16,
    LW_CACHED_UNITS = 1 << 20,  /* unit columns whose weights are kept for the process */
    LW_STRIP_UNITS = 1 << 15,   /* of wide lines so much at a time: their weights stay in the second cache */
    LW_SCRATCH_UNITS = 2048,    /* unit columns whose weights are made on the fly, a strip at a time */
    LW_OVERREAD_UNITS = 64,     /* a kernel may read so many weights beyond a line's end; they meet zeros */
    LW_TILE_BYTES = 1 << 16,
    LW_LANES = 1024,            /* 32-bit sums, per seed, of a tile of transposed storage */
    LW_STREAM_BYTES = 1 << 18,  /* a call that writes at least so much writes past the caches */
};

enum { LW_CAST_NONE = 0, LW_CAST_BFLOAT16 = 1, LW_CAST_FLOAT16 = 2 };

/* One row of a copy table, its offsets turned into addresses. */
struct lw_copy {
    int64_t source_memory, source, target_memory, target;
    int64_t outer, outer_source_stride, outer_target_stride;
    int64_t inner, inner_source_stride, inner_target_stride;
    int64_t chunk_bytes;
};

/* One row of a freeze table; of a digest table it is the part up to `slot`. item_bytes, columns and digest are the
 * target's; the strides are the source's, whose items have 4 bytes if there is a cast. */
struct lw_rectangle {
    int64_t memory, source, row_first, row_step, rows, row_stride;
    int64_t column_first, column_step, columns, column_stride, item_bytes, slot;
    int64_t target_memory, target, target_row_stride, cast;
};

/* Weights of consecutive unit columns: seed s begins at first + s * stride. */
struct lw_weights {
    const int16_t *first;
    size_t stride;
};

/* Lines of contiguous units. target == NULL: they are only digested. */
struct lw_lines {
    const uint8_t *source;
    uint8_t *target;
    int64_t source_stride, target_stride;
    int64_t row_first, row_step, rows, units;
    int unit_bytes, cast, stream, digests;
    struct lw_weights weights;
};

/* Transposed storage: the items of a column lie side by side, columns are column_stride apart. */
struct lw_columns {
    const uint8_t *source;
    int64_t column_stride, columns;
    int64_t row_first, row_step, rows;
    int item_bytes;
    struct lw_weights weights;
};

/* Memory of one call, and whether it writes so much that its targets should not fill the caches. */
struct lw_scratch {
    int stream;
    uint32_t lanes[LW_SEEDS][LW_LANES] __attribute__((aligned(64)));
    uint8_t tile[LW_TILE_BYTES] __attribute__((aligned(64)));
    int16_t weights[LW_SEEDS][LW_SCRATCH_UNITS + LW_OVERREAD_UNITS];
};

struct lw_simd {
    const char *name;
    void (*lines)(const struct lw_lines *lines, uint32_t sums[LW_SEEDS]);
    void (*columns)(const struct lw_columns *columns, struct lw_scratch *scratch, uint32_t sums[LW_SEEDS]);
    void (*stream)(uint8_t *target, const uint8_t *source, int64_t size); /* a copy past the caches */
    void (*fence)(void);                                                  /* orders what was streamed */
};

extern const struct lw_simd lw_portable;
#if LW_X86
extern const struct lw_simd lw_avx2;
#endif
const struct lw_simd *lw_best(void);

/* stream: what is written should not fill the caches. */
void lw_copy_row(const struct lw_copy *row, const struct lw_simd *simd, int stream);

/* rows x columns items from anywhere into lines that lie target_stride apart. */
void lw_gather(uint8_t *target, int64_t target_stride, const uint8_t *source, int64_t row_stride, int64_t column_stride,
               int64_t rows, int64_t columns, int64_t item_bytes);

/* Makes the cached weights of these rows ready. One thread at a time: the GIL is held. */
void lw_prepare(const int64_t *rows, size_t row_columns, size_t count);

/* Digests a rectangle, and moves it if it has a target. sums == NULL: only move. */
void lw_rectangle_run(const struct lw_rectangle *rectangle, const struct lw_simd *simd, struct lw_scratch *scratch,
                      uint32_t *sums);

uint16_t lw_bfloat16(uint32_t bits);
uint16_t lw_float16(uint32_t bits);

static inline uint64_t lw_splitmix64(uint64_t x) {
    uint64_t z = x + 0x9E3779B97F4A7C15u;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
}

static inline int16_t lw_column_weight(int seed, int64_t column) {
    uint64_t key = lw_splitmix64(2 * (uint64_t)seed);
    return (int16_t)(uint16_t)(lw_splitmix64((uint64_t)column + key) | 1);
}

static inline uint32_t lw_row_weight(int seed, int64_t row) {
    uint64_t key = lw_splitmix64(2 * (uint64_t)seed + 1);
    return (uint32_t)lw_splitmix64((uint64_t)row + key) | 1;
}

static inline int64_t lw_least(int64_t a, int64_t b) { return a < b ? a : b; }

#endif
