/* The inner work in plain C: other architectures, and the measure for avx2.c. Written so that compilers can vectorise it. */
#include "kernels.h"

#include <string.h>

uint16_t lw_bfloat16(uint32_t bits) {
    if ((bits & 0x7FFFFFFFu) > 0x7F800000u) return 0x7FC0u;
    return (uint16_t)((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16);
}

uint16_t lw_float16(uint32_t bits) {
    uint32_t sign = (bits >> 16) & 0x8000u, rest = bits & 0x7FFFFFFFu;
    if (rest > 0x7F800000u) return 0x7E00u;
    if (rest >= 0x47800000u) return (uint16_t)(sign | 0x7C00u); /* 65536 and more */
    if (rest >= 0x38800000u) {                                  /* normal: a carry runs into the exponent, as it should */
        uint32_t value = rest - 0x38000000u;
        return (uint16_t)(sign | ((value + 0x0FFFu + ((value >> 13) & 1u)) >> 13));
    }
    if (rest < 0x33000000u) return (uint16_t)sign; /* less than half of the smallest */
    uint32_t shift = 126u - (rest >> 23), mantissa = (rest & 0x7FFFFFu) | 0x800000u;
    uint32_t value = mantissa >> shift, lost = mantissa & ((1u << shift) - 1u), half = 1u << (shift - 1u);
    return (uint16_t)(sign | (value + (lost > half || (lost == half && (value & 1u)))));
}

static void move(uint8_t *target, const uint8_t *source, int64_t units, int unit_bytes, int cast) {
    if (cast == LW_CAST_NONE) {
        memcpy(target, source, (size_t)(units * unit_bytes));
        return;
    }
    for (int64_t i = 0; i < units; i++) {
        uint32_t bits;
        memcpy(&bits, source + 4 * i, 4);
        uint16_t value = cast == LW_CAST_BFLOAT16 ? lw_bfloat16(bits) : lw_float16(bits);
        memcpy(target + 2 * i, &value, 2);
    }
}

static uint32_t dot(const uint8_t *source, const int16_t *weights, int64_t units, int unit_bytes) {
    uint32_t sum = 0;
    if (unit_bytes == 1) {
        for (int64_t i = 0; i < units; i++) sum += (uint32_t)((int32_t)source[i] * weights[i]);
        return sum;
    }
    for (int64_t i = 0; i < units; i++) {
        int16_t unit;
        memcpy(&unit, source + 2 * i, 2);
        sum += (uint32_t)((int32_t)unit * weights[i]);
    }
    return sum;
}

static void lines(const struct lw_lines *l, uint32_t sums[LW_SEEDS]) {
    for (int64_t row = 0; row < l->rows; row++) {
        const uint8_t *source = l->source + row * l->source_stride;
        if (l->target != NULL) {
            uint8_t *target = l->target + row * l->target_stride;
            move(target, source, l->units, l->unit_bytes, l->cast);
            source = target;
        }
        if (!l->digests) continue;
        for (int seed = 0; seed < LW_SEEDS; seed++) {
            const int16_t *weights = l->weights.first + (size_t)seed * l->weights.stride;
            sums[seed] += dot(source, weights, l->units, l->unit_bytes) *
                          lw_row_weight(seed, l->row_first + row * l->row_step);
        }
    }
}

static int32_t unit_at(const uint8_t *item, int unit_bytes, int unit) {
    int16_t value;
    if (unit_bytes == 1) return *item;
    memcpy(&value, item + 2 * unit, 2);
    return value;
}

static void columns(const struct lw_columns *c, struct lw_scratch *scratch, uint32_t sums[LW_SEEDS]) {
    int unit_bytes = c->item_bytes < 2 ? 1 : 2, units = c->item_bytes / unit_bytes;
    for (int64_t top = 0; top < c->rows; top += LW_LANES) {
        int64_t rows = lw_least(LW_LANES, c->rows - top);
        memset(scratch->lanes, 0, sizeof scratch->lanes);
        for (int64_t column = 0; column < c->columns; column++) {
            const uint8_t *line = c->source + column * c->column_stride + top * c->item_bytes;
            for (int unit = 0; unit < units; unit++) {
                for (int seed = 0; seed < LW_SEEDS; seed++) {
                    int32_t weight = c->weights.first[(size_t)seed * c->weights.stride + (size_t)(column * units + unit)];
                    uint32_t *lanes = scratch->lanes[seed];
                    for (int64_t row = 0; row < rows; row++)
                        lanes[row] += (uint32_t)(unit_at(line + row * c->item_bytes, unit_bytes, unit) * weight);
                }
            }
        }
        for (int64_t row = 0; row < rows; row++)
            for (int seed = 0; seed < LW_SEEDS; seed++)
                sums[seed] += scratch->lanes[seed][row] * lw_row_weight(seed, c->row_first + (top + row) * c->row_step);
    }
}

static void stream(uint8_t *target, const uint8_t *source, int64_t size) { memcpy(target, source, (size_t)size); }

static void fence(void) {}

const struct lw_simd lw_portable = {"portable", lines, columns, stream, fence};
