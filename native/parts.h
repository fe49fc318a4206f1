// parts: a run of stored elements seen as fp32, whatever its dtype.
#ifndef TIERMEM_PARTS_H
#define TIERMEM_PARTS_H

#include "dtype.h"

// Where element `begin` of a part lies; begin is a multiple of TM_Q8_BLOCK when the part is 8-bit.
static inline tm_part tm_part_at(const tm_part *part, uint64_t begin) {
    tm_part at = *part;
    if (part->dtype == TM_NONE)
        return at;
    at.data = tm_dtype_at(part->data, part->dtype, begin);
    if (tm_dtype_is_q8(part->dtype))
        at.scales = part->scales + begin / TM_Q8_BLOCK;
    return at;
}

// Whether the part says where its elements are, in a dtype among fp32, bf16, fp16.
static inline bool tm_part_is_plain(const tm_part *part) { return part->data && tm_dtype_is_stored(part->dtype); }

// values[i] = float(part[i]); a SPLIT part is read with the bf16 weight beside it.
void tm_part_load(const tm_loops *loops, uint64_t n, const tm_part *part, const void *weight, float *values);

// part[i] = values[i], to nearest even when `words` is NULL, else stochastically. Not for SPLIT.
void tm_part_save(const tm_loops *loops, uint64_t n, const float *values, const uint32_t *words, const tm_part *part);

#endif
