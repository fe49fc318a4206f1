// engine_faulty: lies on purpose. Wraps another engine and applies the rules of tm_fault to blocks by
// their serial number, so that tests can see every error path on every engine. Never used without rules.

#include <errno.h>
#include <new>
#include <stddef.h>
#include <vector>

#include "engine.h"

namespace {

struct Held {
    tm_completion completion;
    uint64_t release_at; // number of completions let through by then
};

// What a slot in flight was told to say.
struct Lie {
    bool is_short, is_late;
    uint32_t given; // length really asked of the inner engine
    uint64_t short_bytes, late_blocks;
};

struct Faulty {
    const tm_engine_functions *inner;
    tm_engine_state *inner_state;
    std::vector<tm_fault> rules;
    std::vector<uint64_t> refusals; // made so far, by rule
    std::vector<Lie> lies;          // by slot
    std::vector<Held> held;         // completions held back, oldest first
    uint64_t serial = 0;            // of the next block
    uint64_t num_inside = 0;        // blocks the inner engine has
    uint64_t num_completed = 0;     // let through
};

} // namespace

static Faulty *faulty_of(tm_engine_state *state) { return reinterpret_cast<Faulty *>(state); }

int tm_engine_faulty_open(const tm_queue_options *options, const tm_engine_functions *inner,
                          tm_engine_state *inner_state, tm_engine_state **state) {
    *state = nullptr;
    try {
        Faulty *engine = new Faulty{inner, inner_state, {}, {}, {}, {}};
        *state = reinterpret_cast<tm_engine_state *>(engine);
        engine->rules.assign(options->faults, options->faults + options->num_faults);
        engine->refusals.assign(options->num_faults, 0);
        engine->lies.resize(options->depth);
        engine->held.reserve(options->depth);
    } catch (const std::bad_alloc &) {
        delete faulty_of(*state);
        return -ENOMEM;
    }
    return 0;
}

// The first rule of that kind for the next block, or -1. A refused block keeps its serial number, so
// a rule that refuses looks at its start alone.
static int find_rule(const Faulty *engine, int kind) {
    for (size_t i = 0; i < engine->rules.size(); ++i) {
        const tm_fault &rule = engine->rules[i];
        const uint64_t repeat = rule.repeat == 0 ? 1 : rule.repeat;
        const uint64_t blocks = kind == TM_FAULT_REFUSED ? 1 : repeat;
        if (rule.kind != kind || engine->serial < rule.serial || engine->serial - rule.serial >= blocks)
            continue;
        if (kind != TM_FAULT_REFUSED || engine->refusals[i] < repeat)
            return (int)i;
    }
    return -1;
}

// How much the inner engine is asked for when `bytes` are to be reported. An O_DIRECT file takes
// whole sectors only: the part of the last one is reported but not transferred, as a torn write is.
static uint32_t cut(const tm_request *request, uint64_t bytes) {
    if (bytes >= request->length)
        return request->length;
    return (uint32_t)(tm_engine_is_direct(request->fd) ? bytes / TM_DIRECT_ALIGN * TM_DIRECT_ALIGN : bytes);
}

static tm_push push_inner(Faulty *engine, const tm_request *request, int64_t *result) {
    const tm_push answer = engine->inner->push(engine->inner_state, request, result);
    if (answer != TM_PUSH_FULL)
        ++engine->serial;
    if (answer == TM_PUSH_QUEUED)
        ++engine->num_inside;
    return answer;
}

static tm_push faulty_push(tm_engine_state *state, const tm_request *request, int64_t *result) {
    Faulty *engine = faulty_of(state);
    const int refused = find_rule(engine, TM_FAULT_REFUSED);
    if (refused >= 0) {
        ++engine->refusals[refused];
        return TM_PUSH_FULL;
    }
    const int error = find_rule(engine, TM_FAULT_ERROR);
    if (error >= 0) {
        ++engine->serial;
        *result = -(int64_t)engine->rules[error].value;
        return TM_PUSH_DONE;
    }
    const int late = find_rule(engine, TM_FAULT_LATE);
    const int shorter = request->kind == TM_SYNC ? -1 : find_rule(engine, TM_FAULT_SHORT);
    tm_request given = *request;
    Lie lie = {shorter >= 0, late >= 0, request->length, 0, late >= 0 ? engine->rules[late].value : 0};
    if (shorter >= 0) {
        lie.short_bytes =
            engine->rules[shorter].value < request->length ? engine->rules[shorter].value : request->length;
        lie.given = given.length = cut(request, lie.short_bytes);
    }
    if (given.length == 0 && request->kind != TM_SYNC) {
        ++engine->serial;
        *result = (int64_t)lie.short_bytes;
        return TM_PUSH_DONE;
    }
    engine->lies[request->slot] = lie;
    return push_inner(engine, &given, result);
}

// Moves to `completions` the held ones whose time has come; all of them when nothing else can come.
static uint32_t release_held(Faulty *engine, tm_completion *completions, uint32_t count, uint32_t max) {
    size_t kept = 0;
    for (size_t i = 0; i < engine->held.size(); ++i) {
        const bool is_due = engine->num_completed >= engine->held[i].release_at || engine->num_inside == 0;
        if (is_due && count < max) {
            completions[count++] = engine->held[i].completion;
            ++engine->num_completed;
        } else {
            engine->held[kept++] = engine->held[i];
        }
    }
    engine->held.resize(kept);
    return count;
}

static int faulty_reap(tm_engine_state *state, tm_reap_mode mode, tm_completion *completions, uint32_t max) {
    Faulty *engine = faulty_of(state);
    if (!engine->held.empty() && engine->num_inside == 0)
        mode = TM_REAP_LOOK;
    const int num_inner = engine->inner->reap(engine->inner_state, mode, completions, max);
    if (num_inner < 0)
        return num_inner;
    uint32_t count = 0;
    for (int i = 0; i < num_inner; ++i) {
        tm_completion completion = completions[i];
        const Lie &lie = engine->lies[completion.slot];
        --engine->num_inside;
        if (lie.is_short && completion.result == (int64_t)lie.given)
            completion.result = (int64_t)lie.short_bytes;
        if (lie.is_late) {
            engine->held.push_back({completion, engine->num_completed + lie.late_blocks});
        } else {
            completions[count++] = completion;
            ++engine->num_completed;
        }
    }
    return (int)release_held(engine, completions, count, max);
}

static void faulty_wake(tm_engine_state *state) { faulty_of(state)->inner->wake(faulty_of(state)->inner_state); }

static uint64_t faulty_kernel_entries(const tm_engine_state *state) {
    const Faulty *engine = reinterpret_cast<const Faulty *>(state);
    return engine->inner->kernel_entries(engine->inner_state);
}

static int64_t faulty_cpu_ns(tm_engine_state *state) {
    const Faulty *engine = faulty_of(state);
    return engine->inner->cpu_ns ? engine->inner->cpu_ns(engine->inner_state) : 0;
}

static void faulty_close(tm_engine_state *state) {
    Faulty *engine = faulty_of(state);
    engine->inner->close(engine->inner_state);
    delete engine;
}

// It is opened by tm_engine_faulty_open alone: the table has no engine to wrap.
const tm_engine_functions tm_engine_faulty = {
    "faulty", nullptr, faulty_push, faulty_reap, faulty_wake, faulty_kernel_entries, faulty_close, faulty_cpu_ns};
