// Do workers run every task once, and do pinned ones stay off the core that the caller is on?

#include <atomic>
#include <errno.h>
#include <sched.h>
#include <thread>
#include <vector>

#include "check.h"
#include "workers.h"

static std::vector<int32_t> allowed_cores() {
    cpu_set_t allowed;
    CHECK_EQUAL(sched_getaffinity(0, sizeof allowed, &allowed), 0);
    std::vector<int32_t> cores;
    for (int core = 0; core < CPU_SETSIZE; ++core)
        if (CPU_ISSET(core, &allowed))
            cores.push_back(core);
    return cores;
}

static void stay_on(int core) {
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(core, &one);
    CHECK_EQUAL(sched_setaffinity(0, sizeof one, &one), 0);
}

static void test_every_task_runs_once() {
    for (uint32_t num_threads : {1u, 2u, 3u}) {
        tm_workers *workers;
        CHECK_EQUAL(tm_workers_open(num_threads, &workers), 0);
        std::vector<std::atomic<int>> counts(1000);
        const tm_task count = [](void *context, uint64_t index) {
            ++(*(std::vector<std::atomic<int>> *)context)[index];
        };
        tm_workers_run(workers, counts.size(), count, &counts);
        for (const std::atomic<int> &each : counts)
            CHECK_EQUAL(each.load(), 1);
        CHECK_EQUAL(tm_workers_close(workers), 0);
    }
}

// As many tasks as threads: none ends before all have begun, so every thread has one.
struct Meeting {
    unsigned num_tasks;
    std::atomic<unsigned> num_begun{0};
    std::vector<int> cores;
};

static void meet(void *context, uint64_t index) {
    Meeting *meeting = (Meeting *)context;
    meeting->cores[index] = sched_getcpu();
    ++meeting->num_begun;
    while (meeting->num_begun < meeting->num_tasks)
        std::this_thread::yield();
}

static void test_pinned_workers_stay_off_the_callers_core() {
    const std::vector<int32_t> cores = allowed_cores();
    if (cores.size() < 2)
        return; // one core has no other
    tm_workers *workers;
    CHECK_EQUAL(tm_workers_open(2, &workers), 0);
    CHECK_EQUAL(tm_workers_pin(workers, cores.data(), (uint32_t)cores.size()), 0);
    for (int round = 0; round < 20; ++round) {
        const int mine = cores[round % 2], other = cores[1 - round % 2];
        stay_on(mine);
        Meeting meeting;
        meeting.num_tasks = 2;
        meeting.cores.resize(2);
        tm_workers_run(workers, 2, meet, &meeting);
        CHECK(meeting.cores[0] == mine || meeting.cores[1] == mine);
        CHECK(meeting.cores[0] == other || meeting.cores[1] == other);
    }
    CHECK_EQUAL(tm_workers_close(workers), 0);
}

static void test_what_cannot_be_pinned_is_refused() {
    const std::vector<int32_t> cores = allowed_cores();
    tm_workers *workers;
    CHECK_EQUAL(tm_workers_open(2, &workers), 0);
    CHECK_EQUAL(tm_workers_pin(workers, cores.data(), 1), -EINVAL);
    CHECK_EQUAL(tm_workers_pin(workers, nullptr, 2), -EINVAL);
    const int32_t strange[] = {0, 1 << 20};
    CHECK_EQUAL(tm_workers_pin(workers, strange, 2), -EINVAL);
    CHECK_EQUAL(tm_workers_close(workers), 0);
}

int main() {
    RUN(test_every_task_runs_once);
    RUN(test_what_cannot_be_pinned_is_refused);
    RUN(test_pinned_workers_stay_off_the_callers_core);
    return 0;
}
