// optimizer: a step that is stepped range by range, on any thread.
#ifndef TIERMEM_OPTIMIZER_H
#define TIERMEM_OPTIMIZER_H

#include "loops.h"
#include "tiermem.h"

struct tm_ready_step {
    const tm_step *asked;
    const tm_loops *loops;
    tm_constants constants;
    tm_rule_loop *rule;
    const tm_fused *fused; // NULL: through chunks
    bool is_dithered;      // some part is rounded stochastically
    bool is_beside;        // some part is read elsewhere than it is written
    bool is_streamed;      // a weight beside its master goes past the caches
    uint64_t task_numel;   // elements of a task, a multiple of TM_Q8_BLOCK
    uint64_t num_tasks;
};

// What a step needs beside its memory; `asked` stays. Returns 0 or -EINVAL.
int tm_step_ready(const tm_step *asked, tm_ready_step *ready);

// Steps elements [begin, end): begin is a multiple of TM_Q8_BLOCK, and so is end, unless it is the step's own. In the
// float mode of cpu.h.
void tm_step_elements(const tm_ready_step *step, uint64_t begin, uint64_t end);

#endif
