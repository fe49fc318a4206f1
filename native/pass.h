// pass: checksums of pieces and the steps of a tile, in one pass over memory.
#ifndef TIERMEM_PASS_H
#define TIERMEM_PASS_H

#include "tiermem.h"

// Pieces as tm_crc32c takes them.
struct tm_sums {
    uint64_t n;
    const void *const *pieces;
    const uint64_t *bytes;
    uint32_t *crcs;
};

// Makes all steps, as tm_optimizer_step would one after the other. before->crcs become the checksums of what lay there
// before, after->crcs of what lies there then. Pieces may lie anywhere. On -EINVAL and -ENOMEM nothing is stepped.
int tm_pass_run(tm_workers *workers, uint64_t num_steps, const tm_step *steps, const tm_sums *before,
                const tm_sums *after);

#endif
