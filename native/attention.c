/* Walks a step: stores keys and values in their pages; attends, tile by tile, chunk by chunk. */
#include "attention.h"

#include <math.h>
#include <stdlib.h>

static float item(const void *data, int64_t at, int half) {
    return half ? lw_widened(((const uint16_t *)data)[at]) : ((const float *)data)[at];
}

static void put(void *data, int64_t at, int half, float value) {
    if (half) {
        ((uint16_t *)data)[at] = lw_narrowed(value);
    } else {
        ((float *)data)[at] = value;
    }
}

/* The item at which a head's page begins. */
static int64_t page(const struct lw_pages *pages, int32_t block, int64_t kv_head) {
    return (block * pages->kv_heads + kv_head) * pages->block_tokens * pages->dim;
}

static void store_line(void *target, int64_t at, int64_t stride, int half, const struct lw_heads *source, int64_t from,
                       int64_t dim) {
    if (!half && !source->half) {
        for (int64_t d = 0; d < dim; d++) ((float *)target)[at + d * stride] = ((const float *)source->data)[from + d];
    } else if (half && source->half) {
        for (int64_t d = 0; d < dim; d++)
            ((uint16_t *)target)[at + d * stride] = ((const uint16_t *)source->data)[from + d];
    } else {
        for (int64_t d = 0; d < dim; d++) put(target, at + d * stride, half, item(source->data, from + d, source->half));
    }
}

static void store_token(const struct lw_pages *pages, const int32_t *table, int64_t position, int64_t token,
                        const struct lw_heads *key, const struct lw_heads *value) {
    int64_t dim = pages->dim, slot = position % pages->block_tokens;
    for (int64_t head = 0; head < pages->kv_heads; head++) {
        int64_t first = page(pages, table[position / pages->block_tokens], head);
        store_line(pages->keys, first + slot, pages->block_tokens, pages->half, key,
                   token * key->token_stride + head * key->head_stride, dim);
        store_line(pages->values, first + slot * dim, 1, pages->half, value,
                   token * value->token_stride + head * value->head_stride, dim);
    }
}

void lw_store(const struct lw_pages *pages, const struct lw_step *step, const struct lw_heads *key,
              const struct lw_heads *value) {
    for (int64_t row = 0; row < step->rows; row++) {
        const int32_t *table = step->tables + row * step->table_blocks;
        for (int64_t token = step->starts[row]; token < step->starts[row + 1]; token++)
            store_token(pages, table, step->positions[token], token, key, value);
    }
}

/* Memory of one call: the tile's queries, sums and scores; keys and values, if they must be gathered to be read. */
struct scratch {
    int gathers;
    float *queries, *sums, *keys, *values;
    float scores[LW_GROUP * LW_CHUNK];
    int64_t contexts[LW_TILE];
    struct lw_softmax softmax[LW_TILE];
    struct lw_chunk chunk;
};

/* Some queries of one row and kv head: `count` from `first` on, counted over the row's tokens and then the heads of the group.
 * `longest` is the longest context among them. */
struct tile {
    const struct lw_pages *pages;
    const struct lw_step *step;
    const struct lw_heads *query, *out;
    const struct lw_attention_simd *simd;
    struct scratch *scratch;
    const int32_t *table;
    int64_t kv_head, first_token, first, count, longest;
};

static int64_t token_of(const struct tile *tile, int64_t i) {
    return tile->first_token + (tile->first + i) / (tile->query->heads / tile->pages->kv_heads);
}

static int64_t line_of(const struct tile *tile, const struct lw_heads *heads, int64_t i) {
    int64_t group = heads->heads / tile->pages->kv_heads;
    return token_of(tile, i) * heads->token_stride + (tile->kv_head * group + (tile->first + i) % group) * heads->head_stride;
}

/* The tile's queries are cut into parts of nearly equal size, one inner kernel each. */
static int64_t parts(const struct tile *tile) { return (tile->count + LW_GROUP - 1) / LW_GROUP; }
static int64_t part_start(const struct tile *tile, int64_t part) { return part * tile->count / parts(tile); }

static void load_queries(struct tile *tile) {
    struct scratch *scratch = tile->scratch;
    int64_t dim = tile->pages->dim;
    float scale = (float)(1.0 / sqrt((double)dim));
    tile->longest = 0;
    for (int64_t part = 0; part < parts(tile); part++) {
        int64_t start = part_start(tile, part), rows = part_start(tile, part + 1) - start;
        for (int64_t row = 0; row < rows; row++) {
            int64_t i = start + row, line = line_of(tile, tile->query, i);
            int64_t context = tile->step->positions[token_of(tile, i)] + 1;
            scratch->contexts[i] = context;
            scratch->softmax[i] = (struct lw_softmax){-INFINITY, 0.0f};
            if (context > tile->longest) tile->longest = context;
            for (int64_t d = 0; d < dim; d++)
                scratch->queries[start * dim + d * rows + row] = scale * item(tile->query->data, line + d, tile->query->half);
        }
    }
    memset(scratch->sums, 0, (size_t)(tile->count * dim) * sizeof(float));
}

static void store_sums(const struct tile *tile) {
    int64_t dim = tile->pages->dim;
    for (int64_t i = 0; i < tile->count; i++) {
        int64_t line = line_of(tile, tile->out, i);
        float by = 1.0f / tile->scratch->softmax[i].sum;
        for (int64_t d = 0; d < dim; d++)
            put(tile->out->data, line + d, tile->out->half, by * tile->scratch->sums[i * dim + d]);
    }
}

/* `count` positions of one page, which begin at its `slot`, become those from `at` on of the chunk: pointers where the kernels
 * can read the page as it is, floats of one's own otherwise. */
static void take(const struct tile *tile, int64_t first, int64_t slot, int64_t at, int64_t count) {
    const struct lw_pages *pages = tile->pages;
    struct scratch *scratch = tile->scratch;
    struct lw_chunk *chunk = &scratch->chunk;
    int64_t dim = pages->dim, tokens = pages->block_tokens, item_bytes = pages->half ? 2 : 4;
    const char *keys = (const char *)pages->keys + (first + slot) * item_bytes;
    const char *values = (const char *)pages->values + (first + slot * dim) * item_bytes;
    if (pages->half && scratch->gathers) {
        tile->simd->widen(scratch->keys + at, LW_KEY_STRIDE, (const void *)keys, tokens, dim, count);
        tile->simd->widen(scratch->values + at * dim, dim, (const void *)values, dim, count, dim);
        return;
    }
    for (int64_t i = 0; i < count; i++) chunk->values[at + i] = values + i * dim * item_bytes;
    if (!scratch->gathers) {
        for (int64_t i = 0; i < count; i += LW_VECTOR) chunk->keys[(at + i) / LW_VECTOR] = keys + i * item_bytes;
    } else {
        for (int64_t d = 0; d < dim; d++)
            memcpy(scratch->keys + d * LW_KEY_STRIDE + at, keys + d * tokens * item_bytes, (size_t)count * sizeof(float));
    }
}

/* The chunk that begins at position `base`. */
static void load_chunk(const struct tile *tile, int64_t base) {
    const struct lw_pages *pages = tile->pages;
    struct scratch *scratch = tile->scratch;
    struct lw_chunk *chunk = &scratch->chunk;
    int64_t last = lw_less(base + LW_CHUNK, tile->longest), tokens = pages->block_tokens;
    chunk->half = pages->half && !scratch->gathers;
    chunk->key_stride = scratch->gathers ? LW_KEY_STRIDE : tokens;
    if (scratch->gathers) {
        for (int64_t i = 0; i < LW_VECTORS; i++) chunk->keys[i] = scratch->keys + i * LW_VECTOR;
        for (int64_t i = 0; i < LW_CHUNK; i++) chunk->values[i] = scratch->values + i * pages->dim;
    }
    for (int64_t position = base; position < last;) {
        int64_t slot = position % tokens, count = lw_less(tokens - slot, last - position);
        take(tile, page(pages, tile->table[position / tokens], tile->kv_head), slot, position - base, count);
        position += count;
    }
}

/* One part's queries and one chunk. A query mixes exactly the positions that it sees: first those that all of them see. */
static void attend_part(const struct tile *tile, int64_t start, int64_t end, int64_t base) {
    struct scratch *scratch = tile->scratch;
    const struct lw_attention_simd *simd = tile->simd;
    int64_t dim = tile->pages->dim, counts[LW_GROUP], most = 0, common = LW_CHUNK, rows = end - start;
    float *sums = scratch->sums + start * dim;
    for (int64_t row = 0; row < rows; row++) {
        int64_t left = scratch->contexts[start + row] - base;
        counts[row] = left < 0 ? 0 : lw_less(left, LW_CHUNK);
        if (counts[row] > most) most = counts[row];
        if (counts[row] < common) common = counts[row];
    }
    if (most == 0) return;
    int64_t vectors = (most + LW_VECTOR - 1) / LW_VECTOR;
    simd->score(scratch->queries + start * dim, (int)rows, &scratch->chunk, vectors, dim, scratch->scores);
    for (int64_t row = 0; row < rows; row++) {
        if (counts[row] == 0) continue;
        float by = simd->weigh(scratch->scores + row * LW_CHUNK, counts[row], &scratch->softmax[start + row]);
        for (int64_t d = 0; by != 1.0f && d < dim; d++) sums[row * dim + d] *= by;
    }
    if (common > 0) simd->mix(scratch->scores, (int)rows, &scratch->chunk, 0, common, dim, sums);
    for (int64_t row = 0; row < rows; row++)
        if (counts[row] > common)
            simd->mix(scratch->scores + row * LW_CHUNK, 1, &scratch->chunk, common, counts[row], dim, sums + row * dim);
}

static void attend_tile(struct tile *tile) {
    load_queries(tile);
    for (int64_t base = 0; base < tile->longest; base += LW_CHUNK) {
        load_chunk(tile, base);
        for (int64_t part = 0; part < parts(tile); part++)
            attend_part(tile, part_start(tile, part), part_start(tile, part + 1), base);
    }
    store_sums(tile);
}

static void attend_row(struct tile *tile, int64_t row) {
    int64_t group = tile->query->heads / tile->pages->kv_heads;
    int64_t queries = (tile->step->starts[row + 1] - tile->step->starts[row]) * group;
    tile->table = tile->step->tables + row * tile->step->table_blocks;
    tile->first_token = tile->step->starts[row];
    for (tile->kv_head = 0; tile->kv_head < tile->pages->kv_heads; tile->kv_head++) {
        for (tile->first = 0; tile->first < queries; tile->first += LW_TILE) {
            tile->count = lw_less(LW_TILE, queries - tile->first);
            attend_tile(tile);
        }
    }
}

/* A vector of positions must not cross a page, and not every kernel reads bfloat16. */
static struct scratch *new_scratch(const struct lw_pages *pages, const struct lw_attention_simd *simd) {
    int gathers = pages->block_tokens % LW_VECTOR != 0 || (pages->half && !simd->halves);
    size_t dim = (size_t)pages->dim, header = (sizeof(struct scratch) + 63) / 64 * 64;
    size_t floats = dim * (2 * LW_TILE + (gathers ? LW_KEY_STRIDE + LW_CHUNK : 0));
    struct scratch *scratch = aligned_alloc(64, header + (floats * sizeof(float) + 63) / 64 * 64);
    if (scratch == NULL) return NULL;
    scratch->gathers = gathers;
    scratch->queries = (float *)(void *)((char *)scratch + header);
    scratch->sums = scratch->queries + dim * LW_TILE;
    scratch->keys = gathers ? scratch->sums + dim * LW_TILE : NULL;
    scratch->values = gathers ? scratch->keys + dim * LW_KEY_STRIDE : NULL;
    if (gathers) memset(scratch->keys, 0, dim * LW_KEY_STRIDE * sizeof(float));
    return scratch;
}

int lw_attend(const struct lw_pages *pages, const struct lw_step *step, const struct lw_heads *query,
              const struct lw_heads *out, const struct lw_attention_simd *simd) {
    struct scratch *scratch = new_scratch(pages, simd);
    if (scratch == NULL) return -1;
    struct tile tile = {.pages = pages, .step = step, .query = query, .out = out, .simd = simd, .scratch = scratch};
    for (int64_t row = 0; row < step->rows; row++) attend_row(&tile, row);
    free(scratch);
    return 0;
}

const struct lw_attention_simd *lw_attention_best(int64_t dim) {
#if LW_X86
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && dim % lw_attention_avx2.dim_step == 0)
        return &lw_attention_avx2;
#endif
    (void)dim;
    return &lw_attention_portable;
}
