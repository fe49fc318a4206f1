// optimizer: one step over weights, masters, gradients and moments in any allowed dtypes, in one pass over memory.
//
//     elements -> tasks for the workers -> one fused loop, where this combination of dtypes has one (loops_adam.h)
//                                       -> else chunks that stay in the first-level cache:
//                                              widen every part | the rule's loop in fp32 | narrow every part
//
// A step beside what it replaces copies a few elements, then steps them while they are in a cache.
// Parts in fp32 are stepped where they lie. Both ways give the same bits. Formulas and formats: tiermem.h.

#include "optimizer.h"

#include <errno.h>
#include <string.h>

#include "cpu.h"
#include "parts.h"
#include "rounding.h"
#include "workers.h"

typedef tm_ready_step Step;

namespace {

const uint64_t SMALLEST_TASK = TM_NORM_BLOCK; // a multiple of CHUNK, and that of TM_Q8_BLOCK
const uint64_t LARGEST_TASK = 16 * SMALLEST_TASK;
const uint64_t ENOUGH_TASKS = 64; // for the workers to end together
const uint64_t CHUNK = 512;
const uint64_t STREAMED = 1 << 20; // elements from which on no cache keeps a step's parts
const uint64_t COPIED = 1 << 14;   // elements whose copies a cache keeps until they are stepped

// What a chunk works on: fp32 numbers in place or in `memory`.
struct Chunk {
    uint64_t n;
    uint64_t element; // of the whole parameter
    tm_part weight, master, grad, parts[3];
    float *p;
    const float *g;
    float *moments[3];
    float memory[5][CHUNK];
};

} // namespace

// ---- what was asked ----------------------------------------------------------------------------------------------

static bool is_moment(const tm_part *part, bool is_positive) {
    if (tm_dtype_is_q8(part->dtype))
        return part->data && part->scales && part->dtype == (is_positive ? TM_Q8_POSITIVE : TM_Q8);
    return tm_part_is_plain(part);
}

static bool is_absent(const tm_part *part) { return part->dtype == TM_NONE; }

static bool has_valid_moments(const tm_step *step) {
    const tm_part *moments = step->moments;
    switch (step->rule) {
    case TM_ADAMW:
    case TM_ADAM:
        return is_moment(&moments[0], false) && is_moment(&moments[1], true) &&
               (is_absent(&moments[2]) || is_moment(&moments[2], true));
    case TM_ADAGRAD:
        return is_moment(&moments[0], true) && is_absent(&moments[1]) && is_absent(&moments[2]);
    case TM_LION:
        return is_moment(&moments[0], false) && is_absent(&moments[1]) && is_absent(&moments[2]);
    case TM_SGD:
        return (is_absent(&moments[0]) || is_moment(&moments[0], false)) && is_absent(&moments[1]) &&
               is_absent(&moments[2]);
    }
    return false;
}

static bool has_valid_master(const tm_step *step) {
    const tm_part *weight = &step->weight, *master = &step->master;
    if (!is_absent(weight) && !tm_part_is_plain(weight))
        return false;
    if (is_absent(master)) // the weight is the master, and starts from itself
        return !is_absent(weight);
    if (!master->data || ((step->flags & TM_STEP_START_MASTER) && is_absent(weight)))
        return false;
    return master->dtype == TM_F32 || (master->dtype == TM_SPLIT && weight->dtype == TM_BF16);
}

static bool has_valid_sources(const tm_step *step) {
    for (int i = 0; i < 3; ++i)
        if (step->sources[2 + i] && tm_dtype_is_q8(step->moments[i].dtype) && !step->source_scales[2 + i])
            return false;
    return true;
}

static bool is_beside(const tm_step *step) {
    for (const void *source : step->sources)
        if (source)
            return true;
    return false;
}

static bool is_valid(const tm_step *step) {
    const uint32_t flags = TM_STEP_START | TM_STEP_MAXIMIZE | TM_STEP_NESTEROV | TM_STEP_UNFUSED;
    return step->numbers && (step->rounding == TM_NEAREST || step->rounding == TM_STOCHASTIC) &&
           (step->flags & ~flags) == 0 && step->first_element + step->n >= step->n && tm_part_is_plain(&step->grad) &&
           has_valid_moments(step) && has_valid_master(step) && has_valid_sources(step);
}

static tm_constants round_scalars(const tm_step *step) {
    const tm_step_scalars *s = &step->numbers->scalars;
    const bool is_first = step->flags & TM_STEP_START_MOMENTS;
    tm_constants c;
    c.grad_scale = (float)(step->flags & TM_STEP_MAXIMIZE ? -s->grad_scale : s->grad_scale);
    c.decay = (float)s->decay;
    c.step_size = (float)s->step_size;
    c.eps = (float)s->eps;
    c.inv_sqrt_bias2 = (float)s->inv_sqrt_bias2;
    c.beta1 = (float)s->beta1;
    c.one_minus_beta1 = (float)(1.0 - s->beta1);
    c.beta2 = (float)s->beta2;
    c.one_minus_beta2 = (float)(1.0 - s->beta2);
    c.momentum = (float)s->momentum;
    c.one_minus_dampening = (float)(is_first ? 1.0 : 1.0 - s->dampening);
    return c;
}

static int loop_of(const tm_step *step) {
    const bool has_largest = !is_absent(&step->moments[2]);
    switch (step->rule) {
    case TM_ADAMW:
        return has_largest ? TM_LOOP_ADAMW_LARGEST : TM_LOOP_ADAMW;
    case TM_ADAM:
        return has_largest ? TM_LOOP_ADAM_LARGEST : TM_LOOP_ADAM;
    case TM_ADAGRAD:
        return TM_LOOP_ADAGRAD;
    case TM_LION:
        return TM_LOOP_LION;
    }
    if (is_absent(&step->moments[0]))
        return TM_LOOP_SGD;
    return step->flags & TM_STEP_NESTEROV ? TM_LOOP_SGD_NESTEROV : TM_LOOP_SGD_MOMENTUM;
}

static bool is_rounded(const tm_part *part) { return !is_absent(part) && part->dtype != TM_F32; }

static bool needs_words(const tm_step *step) {
    bool needs = is_absent(&step->master) && is_rounded(&step->weight);
    for (const tm_part &moment : step->moments)
        needs = needs || is_rounded(&moment);
    return needs && step->rounding == TM_STOCHASTIC;
}

static bool is_made_for(const tm_fused *fused, const Step *step) {
    const tm_step *asked = step->asked;
    const bool is_q8 = fused->moment == TM_Q8;
    return fused->weight == asked->weight.dtype && fused->master == asked->master.dtype &&
           fused->grad == asked->grad.dtype && fused->moment == asked->moments[0].dtype &&
           (is_q8 ? (int)TM_Q8_POSITIVE : fused->moment) == asked->moments[1].dtype &&
           fused->is_decoupled == (asked->rule == TM_ADAMW) && fused->is_stochastic == step->is_dithered;
}

static const tm_fused *find_fused(const Step *step) {
    const tm_step *asked = step->asked;
    const bool is_adam = asked->rule == TM_ADAMW || asked->rule == TM_ADAM;
    if (!is_adam || !is_absent(&asked->moments[2]) || (asked->flags & (TM_STEP_START | TM_STEP_UNFUSED)))
        return nullptr;
    for (unsigned i = 0; i < step->loops->num_fused; ++i)
        if (is_made_for(&step->loops->fused[i], step))
            return &step->loops->fused[i];
    return nullptr;
}

// ---- through chunks ----------------------------------------------------------------------------------------------

static void fill(float *values, uint64_t n, float value) {
    for (uint64_t i = 0; i < n; ++i)
        values[i] = value;
}

static float *in_place(const tm_part *part, float *otherwise) {
    return part->dtype == TM_F32 ? (float *)part->data : otherwise;
}

static void load_master(const Step *step, Chunk *chunk) {
    const bool is_weight = is_absent(&chunk->master);
    const tm_part *from = is_weight ? &chunk->weight : &chunk->master;
    chunk->p = in_place(from, chunk->memory[0]);
    if (!is_weight && (step->asked->flags & TM_STEP_START_MASTER))
        tm_part_load(step->loops, chunk->n, &chunk->weight, nullptr, chunk->p);
    else if (chunk->p == chunk->memory[0])
        tm_part_load(step->loops, chunk->n, from, chunk->weight.data, chunk->p);
}

static void load(const Step *step, Chunk *chunk) {
    load_master(step, chunk);
    float *grad = in_place(&chunk->grad, chunk->memory[1]);
    if (grad == chunk->memory[1])
        tm_part_load(step->loops, chunk->n, &chunk->grad, nullptr, grad);
    chunk->g = grad;
    for (int i = 0; i < 3; ++i) {
        if (is_absent(&chunk->parts[i])) {
            chunk->moments[i] = nullptr;
            continue;
        }
        float *values = chunk->moments[i] = in_place(&chunk->parts[i], chunk->memory[2 + i]);
        if (step->asked->flags & TM_STEP_START_MOMENTS)
            fill(values, chunk->n,
                 step->asked->rule == TM_ADAGRAD ? (float)step->asked->numbers->scalars.initial : 0.0f);
        else if (values == chunk->memory[2 + i])
            tm_part_load(step->loops, chunk->n, &chunk->parts[i], nullptr, values);
    }
}

// Fills `words` for the chunk's elements; their numbers may pass a multiple of 2^32.
static const uint32_t *draw(const Step *step, const Chunk *chunk, int part, uint32_t *words) {
    if (!step->is_dithered)
        return nullptr;
    const uint64_t left = (1ull << 32) - (uint32_t)chunk->element;
    const uint64_t first = chunk->n < left ? chunk->n : left;
    const tm_step *asked = step->asked;
    const tm_dither dither = tm_dither_at(asked->key, asked->numbers->step, part, chunk->element);
    step->loops->random_words(first, &dither, words);
    if (first < chunk->n) {
        const tm_dither rest = tm_dither_at(asked->key, asked->numbers->step, part, chunk->element + first);
        step->loops->random_words(chunk->n - first, &rest, words + first);
    }
    return words;
}

static void save(const Step *step, const Chunk *chunk) {
    const tm_loops *loops = step->loops;
    static const int DITHERS[] = {TM_DITHER_M, TM_DITHER_V, TM_DITHER_LARGEST};
    uint32_t words[CHUNK];
    for (int i = 0; i < 3; ++i)
        if (is_rounded(&chunk->parts[i]))
            tm_part_save(loops, chunk->n, chunk->moments[i], draw(step, chunk, DITHERS[i], words), &chunk->parts[i]);
    if (chunk->master.dtype == TM_SPLIT)
        loops->narrow_split(chunk->n, chunk->p, (uint16_t *)chunk->weight.data, (uint16_t *)chunk->master.data);
    else if (chunk->master.dtype == TM_F32 && !is_absent(&chunk->weight))
        tm_part_save(loops, chunk->n, chunk->p, nullptr, &chunk->weight);
    else if (is_absent(&chunk->master) && is_rounded(&chunk->weight))
        tm_part_save(loops, chunk->n, chunk->p, draw(step, chunk, TM_DITHER_MASTER, words), &chunk->weight);
}

static void step_chunk(const Step *step, uint64_t begin, uint64_t n) {
    const tm_step *asked = step->asked;
    Chunk chunk;
    chunk.n = n;
    chunk.element = asked->first_element + begin;
    chunk.weight = tm_part_at(&asked->weight, begin);
    chunk.master = tm_part_at(&asked->master, begin);
    chunk.grad = tm_part_at(&asked->grad, begin);
    for (int i = 0; i < 3; ++i)
        chunk.parts[i] = tm_part_at(&asked->moments[i], begin);
    load(step, &chunk);
    step->rule(n, chunk.p, chunk.moments, chunk.g, &step->constants);
    save(step, &chunk);
}

// ---- fused -------------------------------------------------------------------------------------------------------

// Steps as much as the fused loop can take; returns how many elements that was.
static uint64_t step_fused(const Step *step, uint64_t begin, uint64_t n) {
    const tm_step *asked = step->asked;
    n = n / TM_Q8_BLOCK * TM_Q8_BLOCK; // whole registers, and whole blocks of 8-bit codes
    const uint64_t element = asked->first_element + begin;
    if (n == 0 || (step->is_dithered && element >> 32 != (element + n - 1) >> 32))
        return 0;
    const tm_part m = tm_part_at(&asked->moments[0], begin), v = tm_part_at(&asked->moments[1], begin);
    tm_streams streams;
    streams.weight = tm_part_at(&asked->weight, begin).data;
    streams.master = tm_part_at(&asked->master, begin).data;
    streams.grad = tm_part_at(&asked->grad, begin).data;
    streams.m = m.data;
    streams.v = v.data;
    streams.m_scales = m.scales;
    streams.v_scales = v.scales;
    streams.is_streamed = step->is_streamed;
    streams.master_dither = tm_dither_at(asked->key, asked->numbers->step, TM_DITHER_MASTER, element);
    streams.moment_dithers[0] = tm_dither_at(asked->key, asked->numbers->step, TM_DITHER_M, element);
    streams.moment_dithers[1] = tm_dither_at(asked->key, asked->numbers->step, TM_DITHER_V, element);
    step->fused->step(n, &streams, &step->constants);
    return n;
}

// ---- beside what is replaced -------------------------------------------------------------------------------------

static void copy_part(const tm_part *part, const void *source, const uint8_t *scales, uint64_t begin, uint64_t n) {
    if (!source || is_absent(part))
        return;
    const tm_part to = tm_part_at(part, begin);
    memcpy(to.data, tm_dtype_at(source, part->dtype, begin), n * tm_dtype_bytes(part->dtype));
    if (tm_dtype_is_q8(part->dtype))
        memcpy(to.scales, scales + begin / TM_Q8_BLOCK, (n + TM_Q8_BLOCK - 1) / TM_Q8_BLOCK);
}

static void copy_elements(const tm_step *asked, uint64_t begin, uint64_t n) {
    copy_part(&asked->weight, asked->sources[0], nullptr, begin, n);
    copy_part(&asked->master, asked->sources[1], nullptr, begin, n);
    for (int i = 0; i < 3; ++i)
        copy_part(&asked->moments[i], asked->sources[2 + i], asked->source_scales[2 + i], begin, n);
}

// ---- tasks -------------------------------------------------------------------------------------------------------

// The CPU reads ahead of where a task ends, into memory that another thread will read: the fewer ends, the better.
static uint64_t numel_of_tasks(uint64_t n) {
    const uint64_t numel = n / ENOUGH_TASKS / SMALLEST_TASK * SMALLEST_TASK;
    return numel < SMALLEST_TASK ? SMALLEST_TASK : numel > LARGEST_TASK ? LARGEST_TASK : numel;
}

static void step_elements(const Step *step, uint64_t begin, uint64_t end) {
    if (step->fused)
        begin += step_fused(step, begin, end - begin);
    for (; begin < end; begin += CHUNK)
        step_chunk(step, begin, end - begin < CHUNK ? end - begin : CHUNK);
}

void tm_step_elements(const tm_ready_step *step, uint64_t begin, uint64_t end) {
    const uint64_t most = step->is_beside ? COPIED : end - begin;
    for (; begin < end; begin += most) {
        const uint64_t stop = end - begin < most ? end : begin + most;
        if (step->is_beside)
            copy_elements(step->asked, begin, stop - begin);
        step_elements(step, begin, stop);
    }
}

static void step_task(void *context, uint64_t index) {
    const Step *step = (const Step *)context;
    const uint64_t n = step->asked->n, begin = index * step->task_numel;
    tm_step_elements(step, begin, n - begin < step->task_numel ? n : begin + step->task_numel);
}

int tm_step_ready(const tm_step *asked, tm_ready_step *ready) {
    if (!asked || (asked->n != 0 && !is_valid(asked)))
        return -EINVAL;
    *ready = {};
    ready->asked = asked;
    if (asked->n == 0)
        return 0;
    tm_float_mode mode; // the scalars are rounded in it too
    ready->loops = tm_loops_chosen();
    ready->constants = round_scalars(asked);
    ready->is_dithered = needs_words(asked);
    ready->is_beside = is_beside(asked);
    ready->is_streamed = asked->n >= STREAMED && !ready->is_beside;
    ready->task_numel = numel_of_tasks(asked->n);
    ready->num_tasks = (asked->n - 1) / ready->task_numel + 1;
    ready->rule = ready->loops->rules[loop_of(asked)];
    ready->fused = find_fused(ready);
    return 0;
}

int tm_optimizer_step(tm_workers *workers, const tm_step *asked) {
    tm_ready_step ready;
    const int code = tm_step_ready(asked, &ready);
    if (code == 0)
        tm_workers_run(workers, ready.num_tasks, step_task, &ready);
    return code;
}
