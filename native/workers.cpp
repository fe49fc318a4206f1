// workers: persistent threads that sleep on a condition variable between kernels.
//
// A kernel publishes a job, takes tasks from it like everybody else, withdraws it, and waits for the
// workers that joined. A worker that wakes too late finds no job and sleeps again, so a short kernel
// never waits for a slow wake-up. Which thread runs a task is left to chance: results may not depend on it.
//
// Left to itself the scheduler may wake a worker on the caller's own core, where it sleeps through a short kernel.
// Pinned workers stay off it: when the caller has moved to a worker's core, the two change places.

#include "workers.h"

#include <atomic>
#include <condition_variable>
#include <errno.h>
#include <mutex>
#include <new>
#include <sched.h>
#include <signal.h>
#include <thread>
#include <unistd.h>
#include <utility>
#include <vector>

#include "cpu.h"

namespace {

struct Job {
    tm_task task;
    void *context;
    uint64_t num_tasks;
    std::atomic<uint64_t> next;
};

} // namespace

struct tm_workers {
    pid_t owner;           // the process whose threads these are
    std::mutex one_kernel; // held while a kernel uses the threads
    std::mutex mutex;      // guards what follows
    std::condition_variable job_given;
    std::condition_variable job_left;
    Job *job = nullptr;      // NULL: nothing to join
    uint64_t generation = 0; // number of jobs given, so that nobody joins one twice
    unsigned num_joined = 0;
    bool is_closing = false;
    std::vector<std::thread> threads;
    std::vector<int> cores; // empty: not pinned. Of the caller, then of each worker; guarded by one_kernel
};

static void run_tasks(Job *job) {
    for (;;) {
        const uint64_t index = job->next.fetch_add(1, std::memory_order_relaxed);
        if (index >= job->num_tasks)
            return;
        job->task(job->context, index);
    }
}

static void work(tm_workers *workers) {
    tm_float_mode mode;
    uint64_t last = 0;
    std::unique_lock<std::mutex> lock(workers->mutex);
    for (;;) {
        workers->job_given.wait(lock,
                                [&] { return workers->is_closing || (workers->job && workers->generation != last); });
        if (workers->is_closing)
            return;
        Job *job = workers->job;
        last = workers->generation;
        ++workers->num_joined;
        lock.unlock();
        run_tasks(job);
        lock.lock();
        if (--workers->num_joined == 0)
            workers->job_left.notify_one();
    }
}

static void stop(tm_workers *workers) {
    {
        std::lock_guard<std::mutex> lock(workers->mutex);
        workers->is_closing = true;
    }
    workers->job_given.notify_all();
    for (std::thread &thread : workers->threads)
        thread.join();
    delete workers;
}

int tm_workers_open(uint32_t num_threads, tm_workers **workers) {
    if (!workers || num_threads == 0 || num_threads > 1024)
        return -EINVAL;
    tm_workers *made = new (std::nothrow) tm_workers;
    if (!made)
        return -ENOMEM;
    made->owner = getpid();
    // Signals are for the program's own threads.
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int answer = 0;
    try {
        made->threads.reserve(num_threads - 1);
        for (uint32_t i = 1; i < num_threads; ++i)
            made->threads.emplace_back(work, made);
    } catch (const std::bad_alloc &) {
        answer = -ENOMEM;
    } catch (...) {
        answer = -EAGAIN; // no more threads for this process
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    if (answer < 0)
        stop(made);
    else
        *workers = made;
    return answer;
}

int tm_workers_close(tm_workers *workers) {
    if (!workers)
        return -EINVAL;
    if (workers->owner != getpid())
        return -EPIPE; // the threads are not in this process; a lock may be held for ever
    stop(workers);
    return 0;
}

// ---- cores -------------------------------------------------------------------------------------------------------

#if defined(__linux__)
static int move_to(std::thread *thread, int core) {
    if (core < 0 || core >= CPU_SETSIZE)
        return -EINVAL;
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(core, &one);
    return -pthread_setaffinity_np(thread->native_handle(), sizeof one, &one);
}

// Sees that no worker has the caller's core.
static void make_way(tm_workers *workers) {
    std::vector<int> &cores = workers->cores;
    if (cores.empty())
        return;
    const int mine = sched_getcpu();
    for (size_t i = 1; i < cores.size(); ++i)
        if (cores[i] == mine && move_to(&workers->threads[i - 1], cores[0]) == 0)
            std::swap(cores[0], cores[i]);
}

int tm_workers_pin(tm_workers *workers, const int32_t *cores, uint32_t num_cores) {
    if (!workers || !cores || workers->owner != getpid() || num_cores < workers->threads.size() + 1)
        return -EINVAL;
    std::lock_guard<std::mutex> kernel(workers->one_kernel);
    for (size_t i = 0; i < workers->threads.size(); ++i)
        if (const int code = move_to(&workers->threads[i], cores[i + 1]))
            return code;
    try {
        workers->cores.assign(cores, cores + workers->threads.size() + 1);
    } catch (const std::bad_alloc &) {
        return -ENOMEM;
    }
    return 0;
}
#else
static void make_way(tm_workers *workers) { (void)workers; }

int tm_workers_pin(tm_workers *workers, const int32_t *cores, uint32_t num_cores) {
    (void)workers, (void)cores, (void)num_cores;
    return -ENOTSUP;
}
#endif

// ---- running -----------------------------------------------------------------------------------------------------

static void run_alone(uint64_t num_tasks, tm_task task, void *context) {
    for (uint64_t index = 0; index < num_tasks; ++index)
        task(context, index);
}

static void run_shared(tm_workers *workers, Job *job) {
    std::lock_guard<std::mutex> kernel(workers->one_kernel);
    make_way(workers);
    {
        std::lock_guard<std::mutex> lock(workers->mutex);
        workers->job = job;
        ++workers->generation;
    }
    workers->job_given.notify_all();
    run_tasks(job);
    std::unique_lock<std::mutex> lock(workers->mutex);
    workers->job = nullptr;
    workers->job_left.wait(lock, [&] { return workers->num_joined == 0; });
}

void tm_workers_run(tm_workers *workers, uint64_t num_tasks, tm_task task, void *context) {
    tm_float_mode mode;
    if (!workers || num_tasks < 2 || workers->owner != getpid() || workers->threads.empty()) {
        run_alone(num_tasks, task, context);
        return;
    }
    Job job{task, context, num_tasks, {0}};
    run_shared(workers, &job);
}
