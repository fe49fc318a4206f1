// adam: one pass of Adam over master, moments and gradient. Cuts the elements into tasks for the
// workers and each task into chunks that stay in the first-level cache, so that widening the
// gradient and narrowing the low copy cost no pass over memory. The arithmetic is in loops_body.h.

#include <errno.h>
#include <string.h>

#include "cpu.h"
#include "dtype.h"
#include "tiermem.h"
#include "workers.h"

namespace {

const uint64_t TASK = TM_NORM_BLOCK;
const uint64_t CHUNK = 1024;

struct Step {
    const tm_loops *loops;
    tm_adam_constants scalars;
    bool is_decoupled;
    uint64_t n;
    float *master, *m, *v;
    const void *grad;
    int grad_dtype;
    void *low;
    int low_dtype, master_from;
};

} // namespace

static tm_adam_constants round_scalars(const tm_adam_scalars *s) {
    tm_adam_constants c;
    c.grad_scale = (float)s->grad_scale;
    c.decay = (float)s->decay;
    c.one_minus_beta1 = (float)(1.0 - s->beta1);
    c.beta2 = (float)s->beta2;
    c.one_minus_beta2 = (float)(1.0 - s->beta2);
    c.inv_sqrt_bias2 = (float)s->inv_sqrt_bias2;
    c.eps = (float)s->eps;
    c.step_size = (float)s->step_size;
    return c;
}

// First step: the master is what the low copy says, the moments are zero.
static void start_from_low(const Step *step, uint64_t begin, uint64_t n) {
    const void *low = tm_dtype_at(step->low, step->master_from, begin);
    tm_dtype_widen(step->loops, step->master_from, n, low, step->master + begin);
    memset(step->m + begin, 0, n * sizeof(float));
    memset(step->v + begin, 0, n * sizeof(float));
}

static void step_chunk(const Step *step, uint64_t begin, uint64_t n) {
    if (step->master_from != TM_NONE)
        start_from_low(step, begin, n);
    float widened[CHUNK];
    const void *grad = tm_dtype_at(step->grad, step->grad_dtype, begin);
    if (step->grad_dtype != TM_F32) {
        tm_dtype_widen(step->loops, step->grad_dtype, n, grad, widened);
        grad = widened;
    }
    float *p = step->master + begin;
    auto adam = step->is_decoupled ? step->loops->adam_decoupled : step->loops->adam_coupled;
    adam(n, p, step->m + begin, step->v + begin, (const float *)grad, &step->scalars);
    if (step->low_dtype != TM_NONE)
        tm_dtype_narrow(step->loops, step->low_dtype, n, p, tm_dtype_at(step->low, step->low_dtype, begin));
}

static void step_task(void *context, uint64_t index) {
    const Step *step = (const Step *)context;
    const uint64_t end = step->n - index * TASK < TASK ? step->n : (index + 1) * TASK;
    for (uint64_t begin = index * TASK; begin < end; begin += CHUNK)
        step_chunk(step, begin, end - begin < CHUNK ? end - begin : CHUNK);
}

static bool is_valid(const Step *step) {
    if (!step->master || !step->m || !step->v || !step->grad || !tm_dtype_is_stored(step->grad_dtype))
        return false;
    const bool has_low = step->low_dtype != TM_NONE || step->master_from != TM_NONE;
    if (has_low && !step->low)
        return false;
    if (step->low_dtype != TM_NONE && !tm_dtype_is_stored(step->low_dtype))
        return false;
    if (step->master_from == TM_NONE)
        return true;
    return tm_dtype_is_stored(step->master_from) &&
           (step->low_dtype == TM_NONE || step->low_dtype == step->master_from);
}

int tm_adam_step(tm_workers *workers, uint64_t n, void *master, void *m, void *v, const void *grad, int32_t grad_dtype,
                 void *low, int32_t low_dtype, int32_t master_from, const tm_adam_scalars *scalars) {
    if (n == 0)
        return 0;
    if (!scalars)
        return -EINVAL;
    tm_float_mode mode; // the scalars are rounded in it too
    Step step = {tm_loops_chosen(),
                 round_scalars(scalars),
                 scalars->decoupled != 0,
                 n,
                 (float *)master,
                 (float *)m,
                 (float *)v,
                 grad,
                 grad_dtype,
                 low,
                 low_dtype,
                 master_from};
    if (!is_valid(&step))
        return -EINVAL;
    tm_workers_run(workers, (n - 1) / TASK + 1, step_task, &step);
    return 0;
}
