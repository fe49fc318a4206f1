// queue_open: chooses an engine by trying, says in one line which and why, and starts the thread.
//
// The engine is opened on the queue's own thread: some rings belong to the thread that made them.

#include <condition_variable>
#include <errno.h>
#include <new>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "queue.h"

static const uint64_t MAX_BLOCK = 1ull << 30; // below what one system call transfers

namespace {

const uint32_t WHY_BYTES = 400; // of one engine's remark

// What the opener and the new thread tell each other.
struct Opening {
    const tm_queue_options *options;
    int engine = 0; // enum tm_engine: the one in use
    int answer = 0; // 0 or -errno
    char why[TM_NUM_ENGINES * WHY_BYTES] = "";
    bool is_over = false; // guarded by the queue's mutex
    std::condition_variable over;
};

} // namespace

// By enum tm_engine.
static const tm_engine_functions *const engines[] = {nullptr, &tm_engine_uring, &tm_engine_aio, &tm_engine_threads};
static_assert(sizeof engines / sizeof *engines == TM_NUM_ENGINES, "an engine of enum tm_engine is missing");

// Appends one remark to the line that says why.
static void add_why(Opening *opening, const char *engine, const char *between, const char *remark) {
    const size_t used = strlen(opening->why);
    snprintf(opening->why + used, sizeof opening->why - used, "%s%s%s%s", used ? "; " : "", engine,
             remark[0] ? between : "", remark);
}

static int try_engine(tm_queue *q, Opening *opening, int engine) {
    const tm_engine_functions *functions = engines[engine];
    char remark[WHY_BYTES] = "";
    const int answer = functions->open(opening->options, &q->engine_state, remark, sizeof remark);
    if (answer < 0) {
        char refusal[WHY_BYTES + 16];
        snprintf(refusal, sizeof refusal, "no %s", functions->name);
        add_why(opening, refusal, ": ", remark[0] ? remark : strerror(-answer));
        return answer;
    }
    add_why(opening, functions->name, ", ", remark);
    opening->engine = engine;
    q->engine = functions;
    return 0;
}

static int open_engine(tm_queue *q, Opening *opening) {
    const int asked = opening->options->engine;
    int answer = -ENOSYS;
    for (int engine = TM_ENGINE_AUTO + 1; engine < TM_NUM_ENGINES; ++engine) {
        if (asked != TM_ENGINE_AUTO && asked != engine)
            continue;
        answer = try_engine(q, opening, engine);
        if (answer == 0)
            break; // any refusal leads to the next: io_uring's and aio's ENOMEM may be RLIMIT_MEMLOCK or a kernel's
                   // table
    }
    if (answer < 0 || opening->options->num_faults == 0)
        return answer;
    tm_engine_state *inner = q->engine_state;
    answer = tm_engine_faulty_open(opening->options, q->engine, inner, &q->engine_state);
    if (answer < 0) {
        q->engine->close(inner);
        return answer;
    }
    q->engine = &tm_engine_faulty;
    add_why(opening, "with injected faults", "", "");
    return 0;
}

static void run(tm_queue *q, Opening *opening) {
    tm_thread_wakes_soon();
    const int answer = open_engine(q, opening);
    {
        std::lock_guard<std::mutex> lock(q->mutex);
        opening->answer = answer;
        opening->is_over = true;
        opening->over.notify_one(); // under the lock: the opener frees it as soon as it may
    }
    if (answer < 0)
        return;
    tm_queue_serve(q);
}

static bool is_valid(const tm_queue_options *options) {
    if (options->engine < TM_ENGINE_AUTO || options->engine >= TM_NUM_ENGINES)
        return false;
    if (options->depth < 1 || options->depth > 4096 || options->threads > 1024)
        return false;
    if (options->block_bytes == 0 || options->block_bytes % 4096 != 0 || options->block_bytes > MAX_BLOCK)
        return false;
    if (options->flags & ~(uint32_t)(TM_QUEUE_SINGLE_SUBMIT | TM_QUEUE_NO_OVERLAP))
        return false;
    if (options->num_faults > 0 && !options->faults)
        return false;
    if (options->num_regions > 0 && (!options->regions || !options->region_bytes))
        return false;
    for (uint32_t i = 0; i < options->num_regions; ++i)
        if (!options->regions[i] || options->region_bytes[i] == 0)
            return false;
    if (options->num_files > 0 && !options->files)
        return false;
    for (uint32_t i = 0; i < options->num_files; ++i)
        if (options->files[i] < 0)
            return false;
    return true;
}

// Everything the thread will need, so that it never allocates.
static void reserve(tm_queue *q, const tm_queue_options *options) {
    q->block_bytes = options->block_bytes;
    q->is_single = (options->flags & TM_QUEUE_SINGLE_SUBMIT) != 0;
    q->is_in_waves = (options->flags & TM_QUEUE_NO_OVERLAP) != 0;
    q->slots.resize(options->depth);
    q->free_slots.reserve(options->depth);
    for (uint32_t index = options->depth; index > 0; --index)
        q->free_slots.push_back(index - 1);
    q->again.reserve(options->depth);
    q->batch.reserve(options->depth);
    q->completions.resize(options->depth);
}

static void start_thread(tm_queue *q, Opening *opening) {
    // Signals are for the program's own threads.
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    try {
        q->thread = std::thread(run, q, opening);
    } catch (...) {
        opening->answer = -EAGAIN; // no more threads for this process
        opening->is_over = true;
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

static int open_queue(const tm_queue_options *options, tm_queue **queue, Opening *opening) {
    std::unique_ptr<tm_queue> q(new tm_queue);
    q->owner = getpid();
    reserve(q.get(), options);
    start_thread(q.get(), opening);
    {
        std::unique_lock<std::mutex> lock(q->mutex);
        opening->over.wait(lock, [&] { return opening->is_over; });
    }
    if (opening->answer == 0)
        *queue = q.release();
    else if (q->thread.joinable())
        q->thread.join();
    return opening->answer;
}

int tm_queue_open(const tm_queue_options *options, tm_queue **queue, int32_t *engine, char *why, uint32_t why_bytes) {
    if (why && why_bytes > 0)
        why[0] = 0;
    if (!options || !queue || !is_valid(options))
        return -EINVAL;
    Opening opening;
    opening.options = options;
    int answer;
    try {
        answer = open_queue(options, queue, &opening);
    } catch (...) {
        answer = -ENOMEM;
    }
    if (why && why_bytes > 0)
        snprintf(why, why_bytes, "%s", opening.why);
    if (engine)
        *engine = opening.engine;
    return answer;
}
