// latency: how long blocks took, as counts in buckets that are a sixteenth of an octave wide.
//
// Times are taken in units of 64 ns. The first 16 buckets are one unit wide; from 1024 ns on every doubling is cut into
// 16 equal ones. So a bucket's width is at most a sixteenth of the time it stands for; the last one has no upper end.
#ifndef TIERMEM_LATENCY_H
#define TIERMEM_LATENCY_H

#include <stdint.h>

#include "tiermem.h"

static const unsigned TM_LATENCY_UNIT_BITS = 6;   // 64 ns
static const unsigned TM_LATENCY_OCTAVE_BITS = 4; // 16 buckets to an octave

inline uint32_t tm_latency_bucket(int64_t ns) {
    const uint64_t units = ns < 0 ? 0 : (uint64_t)ns >> TM_LATENCY_UNIT_BITS;
    if (units < 1u << TM_LATENCY_OCTAVE_BITS)
        return (uint32_t)units;
    const unsigned octave = 63 - (unsigned)__builtin_clzll(units) - TM_LATENCY_OCTAVE_BITS;
    const uint64_t bucket = ((uint64_t)octave << TM_LATENCY_OCTAVE_BITS) + (units >> octave);
    return bucket < TM_LATENCY_BUCKETS ? (uint32_t)bucket : TM_LATENCY_BUCKETS - 1;
}

// The least time, in nanoseconds, that falls into the bucket.
inline uint64_t tm_latency_floor(uint32_t bucket) {
    const uint32_t octave = bucket >> TM_LATENCY_OCTAVE_BITS;
    const uint64_t step = bucket & ((1u << TM_LATENCY_OCTAVE_BITS) - 1);
    const uint64_t units = octave == 0 ? step : ((1ull << TM_LATENCY_OCTAVE_BITS) + step) << (octave - 1);
    return units << TM_LATENCY_UNIT_BITS;
}

struct tm_latencies {
    uint64_t counts[TM_LATENCY_BUCKETS] = {};
};

#endif
