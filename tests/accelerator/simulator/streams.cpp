#include "streams.h"

#include "recording.h"

#include <c10/util/Exception.h>
#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <mutex>
#include <random>
#include <thread>
#include <vector>

namespace sim {
namespace {

constexpr int64_t POOL_SIZE = 32; // as CUDA's: the 33rd stream that a program makes is its first one again
constexpr size_t NUM_LANES = 6;
constexpr int QUERIES_UNTIL_LATE = 16; // a program that polls an event goes on after so many questions

struct Queue {
    std::deque<Operation> operations; // issued, not done; a runner keeps a reference to the first
    uint64_t num_issued = 0;
    uint64_t num_done = 0;
    bool is_running = false; // a thread runs the first operation, without the lock
    bool is_served = false;  // it has a thread
    int num_queries = 0;     // answered no since the last progress
};

// The state of the process. It is never destroyed, because threads and tensors may outlive main.
struct Streams {
    std::mutex lock; // guards everything below; never held while an operation runs or is destroyed
    std::condition_variable progress;
    std::array<std::deque<Queue>, MAX_DEVICES> streams; // by device and number; 0: the default, then those of the pool
    std::array<int64_t, MAX_DEVICES> next_of_pool{};    // by device
    std::exception_ptr failure;                         // the first error that no host wait has reported
    Schedule schedule = Schedule::AT_ONCE;
    std::mt19937 coin;
    std::array<double, NUM_LANES> pace{}; // bytes a second, by lane
    std::array<uint64_t, NUM_THREADS> num_host_waits{};

    Streams() {
        for (auto &of_device : streams)
            of_device.resize(1 + POOL_SIZE);
    }
};
Streams &all = *new Streams;

std::atomic<bool> context{false};
std::atomic<bool> forked_with_context{false};
thread_local int device_now = 0;
thread_local std::array<int64_t, MAX_DEVICES> stream_now{};

// A fork copies the memory of its parent but none of its devices.
const int fork_handlers = pthread_atfork([] { all.lock.lock(); }, [] { all.lock.unlock(); },
                                         [] {
                                             all.lock.unlock();
                                             forked_with_context = forked_with_context || context;
                                         });

Queue &queue_of(const Mark &mark) { return all.streams.at(mark.device).at(mark.stream); }

c10::Stream stream_of(int device, int64_t number) {
    return c10::Stream(c10::Stream::UNSAFE, device_of(device), number);
}

/// Runs the first operation of a queue without the lock, then takes it out. Returns whether it is done.
bool run_first(Queue &queue, std::unique_lock<std::mutex> &lock, bool may_block) {
    queue.is_running = true;
    Operation &first = queue.operations.front();
    const bool is_threaded = all.schedule == Schedule::THREADS;
    lock.unlock();
    bool is_finished = true;
    try {
        if (first.run)
            first.run();
        else if (may_block)
            run_until(*first.after);
        else
            is_finished = is_done(*first.after);
    } catch (...) {
        std::lock_guard guard(all.lock);
        if (!all.failure)
            all.failure = std::current_exception();
    }
    if (is_threaded && is_finished)
        std::exchange(first.run, {}); // what it uses is free before another thread sees its end
    Operation finished;
    lock.lock();
    if (is_finished) {
        finished = std::move(first);
        queue.operations.pop_front();
        queue.num_done++;
        queue.num_queries = 0;
    }
    queue.is_running = false;
    all.progress.notify_all();
    lock.unlock();
    finished = {}; // may free tensors, which issues operations
    lock.lock();
    return is_finished;
}

/// Runs up to a mark as far as nothing blocks. What it waits for in other streams runs first.
void run_if_possible(const Mark &mark) {
    std::unique_lock lock(all.lock);
    Queue &queue = queue_of(mark);
    while (queue.num_done < mark.index && !queue.is_running) {
        if (const auto run_elsewhere = queue.operations.front().run_elsewhere) {
            lock.unlock();
            return run_elsewhere();
        }
        if (const auto after = queue.operations.front().after) {
            lock.unlock();
            run_if_possible(*after);
            lock.lock();
            if (queue.is_running || queue.num_done >= mark.index)
                return;
        }
        if (!run_first(queue, lock, false))
            return;
    }
}

/// Runs a queue, in a thread of its own, until the schedule has no such threads.
void serve(Queue &queue) {
    pthread_setname_np(pthread_self(), "sim_stream");
    std::unique_lock lock(all.lock);
    while (all.schedule == Schedule::THREADS)
        if (queue.is_running || queue.num_done == queue.num_issued)
            all.progress.wait(lock);
        else
            run_first(queue, lock, true);
    queue.is_served = false;
}

/// A lock whose threads get it in the order in which they ask; of a mutex, who gives it back may be the next to have
/// it.
class Turns {
  public:
    void lock() {
        std::unique_lock held(mine);
        const uint64_t turn = num_asked++;
        given.wait(held, [&] { return num_given == turn; });
    }

    void unlock() {
        const std::lock_guard held(mine);
        ++num_given;
        given.notify_all();
    }

  private:
    std::mutex mine;
    std::condition_variable given;
    uint64_t num_asked = 0, num_given = 0;
};

/// An operation as one of its lane, where streams have threads: a lane runs one at a time, in the order in which they
/// become ready, and takes no less than `seconds`.
std::function<void()> on_lane(std::function<void()> run, Lane lane, double seconds) {
    static auto &lanes = *new std::array<Turns, NUM_LANES>;
    return [run = std::move(run), &mine = lanes[static_cast<size_t>(lane)], seconds] {
        const std::lock_guard<Turns> turn(mine);
        const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
        run();
        std::this_thread::sleep_until(end);
    };
}

/// What the schedule runs after something was issued at `mark`.
void run_by_schedule(const Mark &mark) {
    std::unique_lock lock(all.lock);
    if (all.schedule == Schedule::AT_ONCE) {
        lock.unlock();
        return run_if_possible(mark);
    }
    if (all.schedule == Schedule::THREADS) {
        if (Queue &queue = queue_of(mark); !std::exchange(queue.is_served, true))
            std::thread(serve, std::ref(queue)).detach();
        all.progress.notify_all();
        return;
    }
    if (all.schedule == Schedule::MAIN_FIRST || all.schedule == Schedule::SIDE_FIRST) {
        const bool is_first = (mark.stream == 0) == (all.schedule == Schedule::MAIN_FIRST);
        lock.unlock();
        return is_first ? run_if_possible(mark) : void();
    }
    if (all.schedule != Schedule::RANDOM || all.coin() % 2)
        return;
    std::vector<Mark> choices;
    for (int device = 0; device < device_count(); device++)
        for (size_t number = 0; number < all.streams[device].size(); number++)
            if (const Queue &queue = all.streams[device][number]; queue.num_done < queue.num_issued)
                choices.push_back({device, static_cast<int64_t>(number), queue.num_issued});
    if (choices.empty())
        return;
    Mark choice = choices[all.coin() % choices.size()];
    const uint64_t num_waiting = choice.index - queue_of(choice).num_done;
    choice.index -= all.coin() % (num_waiting + 1);
    lock.unlock();
    run_if_possible(choice);
}

std::vector<Mark> ends_of_streams(int device) {
    std::vector<Mark> ends;
    std::lock_guard lock(all.lock);
    for (size_t number = 0; number < all.streams.at(device).size(); number++)
        ends.push_back({device, static_cast<int64_t>(number), all.streams[device][number].num_issued});
    return ends;
}

} // namespace

WithoutGil::WithoutGil() : saved(Py_IsInitialized() && PyGILState_Check() ? PyEval_SaveThread() : nullptr) {}

WithoutGil::~WithoutGil() {
    if (saved)
        PyEval_RestoreThread(saved);
}

// ---- the context ----------------------------------------------------------------------------------------------------

int device_count() {
    static const int count = [] {
        const char *text = std::getenv("TIERMEM_SIM_DEVICES");
        return text ? std::min(std::max(std::atoi(text), 0), MAX_DEVICES) : 2;
    }();
    return count;
}

void use_context() {
    TORCH_CHECK(!is_bad_fork(), "Cannot re-initialize sim in forked subprocess. To use sim with multiprocessing, fork "
                                "before the first use, or use the 'spawn' start method");
    context = true;
}

bool has_context() { return context && !is_bad_fork(); }
bool is_bad_fork() { return forked_with_context; }

void check_device(int64_t device) {
    TORCH_CHECK(0 <= device && device < device_count(), "sim error: invalid device ordinal: sim:", device,
                ", and there are ", device_count(), " devices (TIERMEM_SIM_DEVICES)");
}

// ---- operations -----------------------------------------------------------------------------------------------------

constexpr std::array<const char *, NUM_LANES> LANE_NAMES{"none",    "compute",         "to device",
                                                         "to host", "between devices", "collective"};

const char *lane_name(Lane lane) { return LANE_NAMES[static_cast<size_t>(lane)]; }

Mark issue(const c10::Stream &stream, Operation operation, const Label &label) {
    Mark mark{stream.device_index(), stream.id(), 0};
    {
        std::lock_guard lock(all.lock);
        Queue &queue = queue_of(mark);
        mark.index = ++queue.num_issued;
        if (is_recording() && operation.after)
            add_entry({Entry::STREAM_WAIT, {"wait"}, "", mark, *operation.after, {}});
        else if (is_recording() && label.lane != Lane::NONE)
            operation.run = timed(std::move(operation.run),
                                  add_entry({Entry::OPERATION, label, lane_name(label.lane), mark, {}, {}}));
        if (all.schedule == Schedule::THREADS && operation.run && label.lane != Lane::COLLECTIVE) {
            const double pace = all.pace[static_cast<size_t>(label.lane)];
            const double seconds = pace > 0 ? static_cast<double>(label.bytes) / pace : 0;
            operation.run = on_lane(std::move(operation.run), label.lane, seconds);
        }
        queue.operations.push_back(std::move(operation));
    }
    run_by_schedule(mark);
    return mark;
}

Mark mark_of(const c10::Stream &stream) {
    Mark mark{stream.device_index(), stream.id(), 0};
    std::lock_guard lock(all.lock);
    mark.index = queue_of(mark).num_issued;
    return mark;
}

void make_wait(const c10::Stream &stream, const Mark &mark) {
    Operation wait;
    wait.after = mark;
    issue(stream, std::move(wait));
}

bool is_done(const Mark &mark) {
    std::lock_guard lock(all.lock);
    return queue_of(mark).num_done >= mark.index;
}

bool query(const Mark &mark) {
    bool gives_in = false;
    {
        std::lock_guard lock(all.lock);
        Queue &queue = queue_of(mark);
        if (queue.num_done >= mark.index)
            return true;
        gives_in =
            ++queue.num_queries > QUERIES_UNTIL_LATE || (all.schedule == Schedule::RANDOM && all.coin() % 4 == 0);
    }
    if (gives_in)
        run_if_possible(mark);
    return is_done(mark);
}

void run_until(const Mark &mark) {
    const WithoutGil released;
    std::unique_lock lock(all.lock);
    Queue &queue = queue_of(mark);
    while (queue.num_done < mark.index) {
        if (queue.is_running)
            all.progress.wait(lock);
        else
            run_first(queue, lock, true);
    }
}

void wait_on_host(const Mark &mark, const std::string &reason) {
    {
        std::lock_guard lock(all.lock);
        all.num_host_waits[this_thread()]++;
    }
    if (is_recording())
        add_entry({Entry::HOST_WAIT, {reason}, "", {}, mark, {}});
    run_until(mark);
    throw_failure();
}

void run_device(int device) {
    for (const Mark &mark : ends_of_streams(device))
        run_until(mark);
}

void wait_on_host_for_device(int device, const std::string &reason) {
    {
        std::lock_guard lock(all.lock);
        all.num_host_waits[this_thread()]++;
    }
    if (is_recording())
        for (const Mark &mark : ends_of_streams(device))
            add_entry({Entry::HOST_WAIT, {reason}, "", {}, mark, {}});
    run_device(device);
    throw_failure();
}

void throw_failure() {
    std::exception_ptr failure;
    {
        std::lock_guard lock(all.lock);
        std::swap(failure, all.failure);
    }
    if (failure)
        std::rethrow_exception(failure);
}

// ---- streams --------------------------------------------------------------------------------------------------------

c10::Stream stream_of_pool(int device) {
    check_device(device);
    use_context();
    std::lock_guard lock(all.lock);
    return stream_of(device, 1 + all.next_of_pool[device]++ % POOL_SIZE);
}

c10::Stream stream_of_its_own(int device) {
    check_device(device);
    use_context();
    std::lock_guard lock(all.lock);
    all.streams.at(device).emplace_back();
    return stream_of(device, static_cast<int64_t>(all.streams[device].size()) - 1);
}

c10::Stream default_stream(int device) { return stream_of(device, 0); }
c10::Stream current_stream(int device) { return stream_of(device, stream_now.at(device)); }

c10::Stream set_current_stream(const c10::Stream &stream) {
    const int64_t before = std::exchange(stream_now.at(stream.device_index()), stream.id());
    return stream_of(stream.device_index(), before);
}

int current_device() { return device_now; }
void set_current_device(int device) { device_now = device; }

// ---- schedules and counts -------------------------------------------------------------------------------------------

void set_schedule(Schedule schedule, uint64_t seed) {
    std::lock_guard lock(all.lock);
    all.schedule = schedule;
    all.coin.seed(static_cast<uint32_t>(seed));
    all.progress.notify_all();
}

void set_pace(const std::string &lane, double bytes_per_s) {
    const auto found = std::find(LANE_NAMES.begin(), LANE_NAMES.end(), lane);
    TORCH_CHECK(found != LANE_NAMES.end(), "sim error: no lane ", lane);
    std::lock_guard lock(all.lock);
    all.pace[found - LANE_NAMES.begin()] = bytes_per_s;
}

Schedule schedule() {
    std::lock_guard lock(all.lock);
    return all.schedule;
}

Thread this_thread() {
    if (gettid() == getpid())
        return MAIN;
    char name[16] = "";
    pthread_getname_np(pthread_self(), name, sizeof name);
    return std::strncmp(name, "pt_autograd", 11) == 0 ? AUTOGRAD : OTHER;
}

const char *thread_name(Thread thread) {
    constexpr std::array names{"main", "autograd", "other"};
    return names[thread];
}

uint64_t num_pending() {
    uint64_t num = 0;
    std::lock_guard lock(all.lock);
    for (const auto &of_device : all.streams)
        for (const Queue &queue : of_device)
            num += queue.num_issued - queue.num_done;
    return num;
}

std::array<uint64_t, NUM_THREADS> num_host_waits() {
    std::lock_guard lock(all.lock);
    return all.num_host_waits;
}

void reset_host_waits() {
    std::lock_guard lock(all.lock);
    all.num_host_waits = {};
}

} // namespace sim
