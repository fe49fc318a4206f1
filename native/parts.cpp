// parts: stored elements to fp32 and back, for kernels chunk by chunk and for callers whole.

#include "parts.h"

#include <errno.h>

#include "cpu.h"
#include "tiermem.h"
#include "workers.h"

namespace {

const uint64_t TASK = TM_NORM_BLOCK; // a multiple of TM_Q8_BLOCK

struct Conversion {
    const tm_loops *loops;
    uint64_t n;
    tm_part part;
    uint16_t *weight;
    float *values;
};

} // namespace

void tm_part_load(const tm_loops *loops, uint64_t n, const tm_part *part, const void *weight, float *values) {
    if (part->dtype == TM_SPLIT)
        loops->widen_split(n, (const uint16_t *)weight, (const uint16_t *)part->data, values);
    else if (part->dtype == TM_Q8)
        loops->widen_q8(n, (const uint8_t *)part->data, part->scales, values);
    else if (part->dtype == TM_Q8_POSITIVE)
        loops->widen_q8_positive(n, (const uint8_t *)part->data, part->scales, values);
    else
        tm_dtype_widen(loops, part->dtype, n, part->data, values);
}

void tm_part_save(const tm_loops *loops, uint64_t n, const float *values, const uint32_t *words, const tm_part *part) {
    if (part->dtype == TM_Q8)
        loops->narrow_q8(n, values, words, (uint8_t *)part->data, part->scales);
    else if (part->dtype == TM_Q8_POSITIVE)
        loops->narrow_q8_positive(n, values, words, (uint8_t *)part->data, part->scales);
    else if (words && part->dtype == TM_BF16)
        loops->dither_bf16(n, values, words, (uint16_t *)part->data);
    else if (words && part->dtype == TM_F16)
        loops->dither_f16(n, values, words, (uint16_t *)part->data);
    else
        tm_dtype_narrow(loops, part->dtype, n, values, part->data);
}

static bool is_valid(const Conversion *conversion) {
    const tm_part *part = &conversion->part;
    if (!conversion->values || !part->data)
        return false;
    if (part->dtype == TM_SPLIT)
        return conversion->weight != nullptr;
    return tm_dtype_is_q8(part->dtype) ? part->scales != nullptr : tm_dtype_is_stored(part->dtype);
}

static void widen_task(void *context, uint64_t index) {
    const Conversion *all = (const Conversion *)context;
    const uint64_t begin = index * TASK, n = all->n - begin < TASK ? all->n - begin : TASK;
    const tm_part part = tm_part_at(&all->part, begin);
    tm_part_load(all->loops, n, &part, all->weight + begin, all->values + begin);
}

static void narrow_task(void *context, uint64_t index) {
    const Conversion *all = (const Conversion *)context;
    const uint64_t begin = index * TASK, n = all->n - begin < TASK ? all->n - begin : TASK;
    const tm_part part = tm_part_at(&all->part, begin);
    if (part.dtype == TM_SPLIT)
        all->loops->split(n, all->values + begin, all->weight + begin, (uint16_t *)part.data);
    else
        tm_part_save(all->loops, n, all->values + begin, nullptr, &part);
}

static int convert(tm_workers *workers, tm_task task, uint64_t n, const tm_part *part, void *weight, float *values) {
    if (n == 0)
        return 0;
    if (!part)
        return -EINVAL;
    Conversion conversion = {tm_loops_chosen(), n, *part, (uint16_t *)weight, values};
    if (!is_valid(&conversion))
        return -EINVAL;
    tm_workers_run(workers, (n - 1) / TASK + 1, task, &conversion);
    return 0;
}

int tm_part_widen(tm_workers *workers, uint64_t n, const tm_part *part, const void *weight, float *values) {
    return convert(workers, widen_task, n, part, (void *)weight, values);
}

int tm_part_narrow(tm_workers *workers, uint64_t n, const float *values, const tm_part *part, void *weight) {
    return convert(workers, narrow_task, n, part, weight, (float *)values);
}
