// engine_threads: blocks are read and written by ordinary threads with pread and pwrite. The engine of
// last resort; it needs nothing from the kernel.

#include <atomic>
#include <condition_variable>
#include <errno.h>
#include <mutex>
#include <new>
#include <stdio.h>
#include <thread>
#include <unistd.h>
#include <vector>

#include "engine.h"

namespace {

// A ring of fixed size: the queue never has more than `depth` blocks here.
template <typename Item> class Ring {
  public:
    explicit Ring(uint32_t capacity) : items_(capacity) {}
    bool is_empty() const { return count_ == 0; }
    bool is_full() const { return count_ == items_.size(); }
    void put(const Item &item) { items_[(first_ + count_++) % items_.size()] = item; }
    Item take() {
        const Item item = items_[first_];
        first_ = (first_ + 1) % items_.size();
        --count_;
        return item;
    }

  private:
    std::vector<Item> items_;
    size_t first_ = 0, count_ = 0;
};

struct Threads {
    explicit Threads(uint32_t depth) : requests(depth), completions(depth) {}
    std::mutex mutex; // guards everything below but kernel_entries
    std::condition_variable request_put, completion_put;
    Ring<tm_request> requests;
    Ring<tm_completion> completions;
    bool is_woken = false;
    bool is_closing = false;
    std::atomic<uint64_t> kernel_entries{0};
    std::vector<std::thread> threads;
};

} // namespace

static Threads *threads_of(tm_engine_state *state) { return reinterpret_cast<Threads *>(state); }

static int64_t transfer(const tm_request &request) {
    int64_t result;
    if (request.kind == TM_READ)
        result = pread(request.fd, request.buffer, request.length, (off_t)request.offset);
    else if (request.kind == TM_WRITE)
        result = pwrite(request.fd, request.buffer, request.length, (off_t)request.offset);
    else
        result = fdatasync(request.fd);
    return result < 0 ? -errno : result;
}

static void serve(Threads *engine) {
    std::unique_lock<std::mutex> lock(engine->mutex);
    for (;;) {
        engine->request_put.wait(lock, [&] { return engine->is_closing || !engine->requests.is_empty(); });
        if (engine->requests.is_empty())
            return;
        const tm_request request = engine->requests.take();
        lock.unlock();
        const int64_t result = transfer(request);
        engine->kernel_entries.fetch_add(1, std::memory_order_relaxed);
        lock.lock();
        engine->completions.put({request.slot, result});
        engine->completion_put.notify_one();
    }
}

static void threads_close(tm_engine_state *state) {
    Threads *engine = threads_of(state);
    {
        std::lock_guard<std::mutex> lock(engine->mutex);
        engine->is_closing = true;
    }
    engine->request_put.notify_all();
    for (std::thread &thread : engine->threads)
        thread.join();
    delete engine;
}

static int threads_open(const tm_queue_options *options, tm_engine_state **state, char *why, uint32_t why_bytes) {
    uint32_t num_threads = options->threads ? options->threads : 8;
    if (num_threads > options->depth)
        num_threads = options->depth;
    Threads *engine = nullptr;
    int error = 0;
    try {
        engine = new Threads(options->depth);
        engine->threads.reserve(num_threads);
        for (uint32_t i = 0; i < num_threads; ++i)
            engine->threads.emplace_back(serve, engine);
    } catch (const std::bad_alloc &) {
        error = -ENOMEM;
    } catch (...) {
        error = -EAGAIN;
    }
    if (error == 0) {
        snprintf(why, why_bytes, "%u of them", num_threads);
        *state = reinterpret_cast<tm_engine_state *>(engine);
        return 0;
    }
    if (engine)
        threads_close(reinterpret_cast<tm_engine_state *>(engine));
    snprintf(why, why_bytes, "no %u threads to be had (see ulimit -u)", num_threads);
    return error;
}

static tm_push threads_push(tm_engine_state *state, const tm_request *request, int64_t *) {
    Threads *engine = threads_of(state);
    std::lock_guard<std::mutex> lock(engine->mutex);
    if (engine->requests.is_full())
        return TM_PUSH_FULL;
    engine->requests.put(*request);
    engine->request_put.notify_one();
    return TM_PUSH_QUEUED;
}

static int threads_reap(tm_engine_state *state, tm_reap_mode mode, tm_completion *completions, uint32_t max) {
    Threads *engine = threads_of(state);
    std::unique_lock<std::mutex> lock(engine->mutex);
    if (mode == TM_REAP_WAIT)
        engine->completion_put.wait(lock, [&] { return engine->is_woken || !engine->completions.is_empty(); });
    engine->is_woken = false;
    uint32_t count = 0;
    while (count < max && !engine->completions.is_empty())
        completions[count++] = engine->completions.take();
    return (int)count;
}

static void threads_wake(tm_engine_state *state) {
    Threads *engine = threads_of(state);
    std::lock_guard<std::mutex> lock(engine->mutex);
    engine->is_woken = true;
    engine->completion_put.notify_one();
}

static uint64_t threads_kernel_entries(const tm_engine_state *state) {
    return reinterpret_cast<const Threads *>(state)->kernel_entries.load(std::memory_order_relaxed);
}

static int64_t threads_cpu_ns(tm_engine_state *state) {
    int64_t sum = 0;
    for (std::thread &thread : threads_of(state)->threads)
        sum += tm_thread_cpu_ns(&thread);
    return sum;
}

const tm_engine_functions tm_engine_threads = {"threads",    threads_open,           threads_push,  threads_reap,
                                               threads_wake, threads_kernel_entries, threads_close, threads_cpu_ns};
