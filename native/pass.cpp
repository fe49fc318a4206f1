// pass: CRC-32C of many pieces on the shared threads, and the steps of a tile between two such sums.
//
//     pieces     [      piece 0      |      piece 1      | ... ]     one checksum each
//     tasks      [   task 0   |   task 1   | ...                     elements of one step; bytes that no step has
//     stretches  [            |      |     |             | ... ]     pieces, cut where another task or part begins
//
// A task goes through its elements in chunks that a core's cache keeps: it sums what a chunk holds, steps it, and sums
// what it holds now. So memory is read once and written once. The checksums of a piece's stretches are joined in their
// order. Bytes that no step has are cut in parts of equal length, so that one large piece keeps every thread busy.
// Which loop sums follows the processor alone, not tm_isa_choose: they all give the same.

#include "pass.h"

#include <algorithm>
#include <errno.h>
#include <new>
#include <vector>

#include "checksum.h"
#include "optimizer.h"
#include "parts.h"
#include "workers.h"

namespace {

const uint64_t CHUNK = 1 << 15;      // elements: up to 18 bytes each, in a second-level cache of a megabyte
const uint64_t PART = 1 << 20;       // bytes of a piece that no step has: one task
const uint64_t SMALL_PART = 1 << 18; // when there is so little that threads would stand idle
const uint64_t LITTLE = 8 * PART;

// The memory of one part of a step, or of its scales.
struct Range {
    uintptr_t begin, end;
    uint64_t bytes, numel; // so many bytes for so many elements
    uint64_t first_task, task_numel;

    uintptr_t at(uint64_t element) const { return begin + (element + numel - 1) / numel * bytes; }
};

struct Stretch {
    uintptr_t begin, end;
    const Range *range; // NULL: no step has it
    int64_t next;       // of the same task; -1: none
};

// The pieces before the steps, or after them.
struct Side {
    const tm_sums *asked;
    std::vector<uint64_t> first; // stretch of each piece, and the number of all
    std::vector<Stretch> stretches;
    std::vector<uint64_t> bytes; // of each stretch
    std::vector<uint32_t> crcs;
    std::vector<int64_t> heads; // a stretch of each task
};

struct Pass {
    tm_crc_loop loop;
    std::vector<tm_ready_step> steps;
    std::vector<uint64_t> first; // task of each step, and the number of all
    std::vector<Range> ranges;   // ascending
    Side before, after;
};

} // namespace

static tm_crc_loop best_loop() {
    tm_crc_loop loops[3];
    const char *names[3];
    return loops[tm_crc_loops(loops, names) - 1];
}

// ---- plan ---------------------------------------------------------------------------------------------------------

static void add_range(Pass *pass, const tm_ready_step &step, const void *data, uint64_t bytes, uint64_t numel) {
    const uint64_t all = (step.asked->n + numel - 1) / numel * bytes;
    pass->ranges.push_back({(uintptr_t)data, (uintptr_t)data + all, bytes, numel, pass->first.back(), step.task_numel});
}

static void add_part(Pass *pass, const tm_ready_step &step, const tm_part &part) {
    if (part.dtype == TM_NONE)
        return;
    add_range(pass, step, part.data, tm_dtype_bytes(part.dtype), 1);
    if (tm_dtype_is_q8(part.dtype))
        add_range(pass, step, part.scales, 1, TM_Q8_BLOCK);
}

static int add_steps(Pass *pass, uint64_t num_steps, const tm_step *steps) {
    pass->first.push_back(0);
    for (uint64_t i = 0; i < num_steps; ++i) {
        tm_ready_step step;
        const int code = tm_step_ready(&steps[i], &step);
        if (code < 0)
            return code;
        if (steps[i].n == 0)
            continue;
        step.is_streamed = step.is_streamed && pass->after.asked->n == 0;
        for (const tm_part *part : {&steps[i].weight, &steps[i].master, &steps[i].grad})
            add_part(pass, step, *part);
        for (const tm_part &moment : steps[i].moments)
            add_part(pass, step, moment);
        pass->steps.push_back(step);
        pass->first.push_back(pass->first.back() + step.num_tasks);
    }
    std::sort(pass->ranges.begin(), pass->ranges.end(),
              [](const Range &a, const Range &b) { return a.begin < b.begin; });
    return 0;
}

static bool has_overlap(const std::vector<Range> &ranges) {
    for (size_t i = 1; i < ranges.size(); ++i)
        if (ranges[i].begin < ranges[i - 1].end)
            return true;
    return false;
}

static uint64_t part_bytes_of(const tm_sums *asked) {
    uint64_t total = 0;
    for (uint64_t i = 0; i < asked->n && total < LITTLE; ++i)
        total += std::min(asked->bytes[i], LITTLE);
    return total < LITTLE ? SMALL_PART : PART;
}

static void cut(const Pass *pass, Side *side) {
    const tm_sums *asked = side->asked;
    const uint64_t most = part_bytes_of(asked);
    side->heads.assign(pass->first.back(), -1);
    side->first.push_back(0);
    for (uint64_t i = 0; i < asked->n; ++i) {
        const uintptr_t end = (uintptr_t)asked->pieces[i] + asked->bytes[i];
        for (uintptr_t at = end - asked->bytes[i], stop = end; at != end; at = stop, stop = end) {
            const auto is_before = [](uintptr_t address, const Range &range) { return address < range.begin; };
            const auto next = std::upper_bound(pass->ranges.begin(), pass->ranges.end(), at, is_before);
            const Range *range = next != pass->ranges.begin() && at < next[-1].end ? &next[-1] : nullptr;
            uint64_t task = side->heads.size();
            if (range) {
                const uint64_t number = (at - range->begin) / range->bytes * range->numel / range->task_numel;
                task = range->first_task + number;
                stop = std::min({end, range->end, range->at((number + 1) * range->task_numel)});
            } else {
                side->heads.push_back(-1);
                stop = at + std::min(end - at, most);
                stop = next == pass->ranges.end() ? stop : std::min(stop, next->begin);
            }
            side->stretches.push_back({at, stop, range, side->heads[task]});
            side->heads[task] = (int64_t)side->bytes.size();
            side->bytes.push_back(stop - at);
        }
        side->first.push_back(side->bytes.size());
    }
    side->crcs.assign(side->bytes.size(), ~0u);
}

// ---- run ----------------------------------------------------------------------------------------------------------

// Goes on with the stretches of a task: what they hold of elements [begin, end).
static void sum(tm_crc_loop loop, Side *side, uint64_t task, uint64_t begin, uint64_t end) {
    for (int64_t i = task < side->heads.size() ? side->heads[task] : -1; i >= 0; i = side->stretches[(size_t)i].next) {
        const Stretch &stretch = side->stretches[(size_t)i];
        uintptr_t from = stretch.begin, to = stretch.end;
        if (const Range *range = stretch.range) {
            from = std::max(from, range->at(begin));
            to = std::min(to, range->at(end));
        }
        if (from < to)
            side->crcs[(size_t)i] = loop(side->crcs[(size_t)i], (const uint8_t *)from, to - from);
    }
}

static void run_task(void *context, uint64_t task) {
    Pass *pass = (Pass *)context;
    const auto behind = std::upper_bound(pass->first.begin(), pass->first.end(), task);
    const bool is_step = behind != pass->first.end();
    const tm_ready_step *step = is_step ? &pass->steps[(size_t)(behind - pass->first.begin()) - 1] : nullptr;
    uint64_t begin = is_step ? (task - behind[-1]) * step->task_numel : 0;
    const uint64_t end = is_step ? std::min(step->asked->n, begin + step->task_numel) : 1;
    const bool is_summed = pass->before.asked->n + pass->after.asked->n > 0;
    for (uint64_t stop; begin < end; begin = stop) {
        stop = is_summed ? std::min(end, begin + CHUNK) : end;
        sum(pass->loop, &pass->before, task, begin, stop);
        if (step)
            tm_step_elements(step, begin, stop);
        sum(pass->loop, &pass->after, task, begin, stop);
    }
}

static void join(Side *side) {
    for (uint32_t &crc : side->crcs)
        crc = ~crc;
    tm_crc32c_join(side->asked->n, side->first.data(), side->crcs.data(), side->bytes.data(), side->asked->crcs);
}

// Steps that share memory follow one another, as they were given.
static int run_in_turn(tm_workers *workers, uint64_t num_steps, const tm_step *steps, const tm_sums *before,
                       const tm_sums *after) {
    const tm_sums none = {};
    int code = tm_pass_run(workers, 0, nullptr, before, &none);
    for (uint64_t i = 0; i < num_steps && code == 0; ++i)
        code = tm_optimizer_step(workers, &steps[i]);
    return code == 0 ? tm_pass_run(workers, 0, nullptr, &none, after) : code;
}

int tm_pass_run(tm_workers *workers, uint64_t num_steps, const tm_step *steps, const tm_sums *before,
                const tm_sums *after) {
    static const tm_crc_loop loop = best_loop();
    try {
        Pass pass = {};
        pass.loop = loop;
        pass.before.asked = before;
        pass.after.asked = after;
        const int code = add_steps(&pass, num_steps, steps);
        if (code < 0)
            return code;
        if (has_overlap(pass.ranges))
            return run_in_turn(workers, num_steps, steps, before, after);
        cut(&pass, &pass.before);
        cut(&pass, &pass.after);
        tm_workers_run(workers, std::max(pass.before.heads.size(), pass.after.heads.size()), run_task, &pass);
        join(&pass.before);
        join(&pass.after);
    } catch (const std::bad_alloc &) {
        return -ENOMEM;
    }
    return 0;
}

int tm_crc32c(tm_workers *workers, uint64_t n, const void *const *pieces, const uint64_t *bytes, uint32_t *crcs) {
    if (n && (!pieces || !bytes || !crcs))
        return -EINVAL;
    for (uint64_t i = 0; i < n; ++i)
        if (bytes[i] && !pieces[i])
            return -EINVAL;
    const tm_sums none = {}, sums = {n, pieces, bytes, crcs};
    return tm_pass_run(workers, 0, nullptr, &sums, &none);
}
