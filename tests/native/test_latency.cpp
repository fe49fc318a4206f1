// Is every block counted once, in the bucket of its time, and does each clock of the queue count what it says?

#include "fixture.h"
#include "latency.h"

static const uint64_t BLOCK = 4096;

static void a_bucket_begins_where_the_one_before_ends() {
    CHECK_EQUAL(tm_latency_floor_ns(0), 0);
    CHECK_EQUAL(tm_latency_floor_ns(16), 1024);
    for (uint32_t bucket = 1; bucket < TM_LATENCY_BUCKETS; ++bucket) {
        const int64_t floor = tm_latency_floor_ns(bucket);
        CHECK_EQUAL(tm_latency_bucket(floor), bucket);
        CHECK_EQUAL(tm_latency_bucket(floor - 1), bucket - 1);
        if (bucket >= 16)
            CHECK((tm_latency_floor_ns(bucket + 1) - floor) * 16 <= floor);
    }
    CHECK(tm_latency_floor_ns(TM_LATENCY_BUCKETS - 1) > 60000000000ll);
    CHECK_EQUAL(tm_latency_floor_ns(UINT32_MAX), tm_latency_floor_ns(TM_LATENCY_BUCKETS));
    CHECK_EQUAL(tm_latency_bucket(INT64_MAX), TM_LATENCY_BUCKETS - 1);
    CHECK_EQUAL(tm_latency_bucket(-1), 0);
}

struct Counts {
    uint64_t buckets[TM_LATENCY_BUCKETS], sum = 0;
    Counts(const Queue &queue, int kind) {
        CHECK_EQUAL(tm_queue_latencies(queue.q, kind, buckets), 0);
        for (uint64_t count : buckets)
            sum += count;
    }
};

static void every_block_in_full_is_counted_once(int engine) {
    File file(true);
    Memory memory(20 * BLOCK);
    // The second write fails, the fourth is short and is finished.
    Queue queue(engine, 4, BLOCK, {{1, EIO, TM_FAULT_ERROR, 1}, {3, 0, TM_FAULT_SHORT, 1}});
    CHECK_EQUAL(Counts(queue, TM_READ).sum + Counts(queue, TM_WRITE).sum, 0);
    for (uint64_t i = 0; i < 7; ++i)
        CHECK_EQUAL(queue.transfer(op_of(TM_WRITE, file, memory.data, BLOCK, i * BLOCK, 1)).error, i == 1 ? EIO : 0);
    CHECK_EQUAL(queue.transfer(op_of(TM_SYNC, file, nullptr, 0, 0, 1)).error, 0);
    CHECK_EQUAL(queue.transfer(op_of(TM_WRITE, file, memory.data, 20 * BLOCK, 0, 1)).error, 0);
    CHECK_EQUAL(queue.transfer(op_of(TM_READ, file, memory.data, 13 * BLOCK, 0, 1)).error, 0);
    CHECK_EQUAL(Counts(queue, TM_WRITE).sum, 6 + 20);
    CHECK_EQUAL(Counts(queue, TM_READ).sum, 13);
    uint64_t counts[TM_LATENCY_BUCKETS];
    CHECK_EQUAL(tm_queue_latencies(queue.q, TM_SYNC, counts), -EINVAL);
    CHECK_EQUAL(tm_queue_latencies(queue.q, -1, counts), -EINVAL);
}

// A single block's time lies between those of its tag.
static void a_time_is_that_of_the_block(int engine) {
    File file(true);
    Memory memory(BLOCK);
    file.set_size(BLOCK);
    Queue queue(engine, 4, BLOCK);
    const tm_answer answer = queue.transfer(op_of(TM_READ, file, memory.data, BLOCK, 0, 1));
    const Counts counts(queue, TM_READ);
    CHECK_EQUAL(counts.buckets[tm_latency_bucket(answer.finished_ns - answer.started_ns)], 1);
    CHECK_EQUAL(counts.sum, 1);
}

static void clocks_stand_still_when_nothing_is_wanted(int engine) {
    File file(true);
    Memory memory(64 * BLOCK);
    Queue queue(engine, 4, BLOCK);
    CHECK_EQUAL(queue.counters().wanted_ns, 0);
    const tm_op op = op_of(TM_WRITE, file, memory.data, 64 * BLOCK, 0, 1);
    const tm_answer answer = queue.transfer(op);
    const tm_counters first = queue.counters();
    CHECK_EQUAL(first.wanted_ns, answer.finished_ns - answer.submitted_ns);
    CHECK(first.busy_ns > 0 && first.busy_ns <= answer.finished_ns - answer.started_ns);
    CHECK(first.cpu_ns > 0);
    CHECK_EQUAL(tm_queue_submit(queue.q, &op, 1), 0);
    const tm_op late = op_of(TM_WRITE, file, memory.data, BLOCK, 0, 2, TM_BACKGROUND);
    CHECK_EQUAL(tm_queue_submit(queue.q, &late, 1), 0);
    const tm_answer last = queue.wait(2);
    const tm_answer other = queue.wait(1);
    const int64_t end = last.finished_ns > other.finished_ns ? last.finished_ns : other.finished_ns;
    usleep(1000);
    const tm_counters second = queue.counters(), third = queue.counters();
    const bool is_apart = other.finished_ns <= last.submitted_ns;
    CHECK_EQUAL(second.wanted_ns - first.wanted_ns,
                is_apart ? other.finished_ns - other.submitted_ns + last.finished_ns - last.submitted_ns
                         : end - other.submitted_ns);
    CHECK_EQUAL(third.wanted_ns, second.wanted_ns);
    CHECK_EQUAL(third.busy_ns, second.busy_ns);
    CHECK(second.busy_ns <= second.wanted_ns);
}

static void a_refused_submission_starts_no_clock(int engine) {
    File file(true);
    Memory memory(BLOCK);
    file.set_size(BLOCK);
    Queue queue(engine, 1, BLOCK);
    CHECK_EQUAL(queue.transfer(op_of(TM_READ, file, memory.data, BLOCK, 0, 7)).error, 0);
    const tm_op taken = op_of(TM_READ, file, memory.data, BLOCK, 0, 7);
    CHECK_EQUAL(tm_queue_submit(queue.q, &taken, 1), 0);
    tm_op ops[] = {taken, taken, taken, taken};
    ops[0].tag = ops[2].tag = 8;
    ops[1].tag = 9;
    CHECK_EQUAL(tm_queue_submit(queue.q, ops, 4), -EEXIST); // for the last of them
    tm_answer answer;
    CHECK_EQUAL(tm_queue_wait(queue.q, 8, 0, &answer), -ENOENT);
    CHECK_EQUAL(tm_queue_wait(queue.q, 9, 0, &answer), -ENOENT);
    CHECK_EQUAL(queue.wait(7).error, 0);
    const tm_counters idle = queue.counters();
    CHECK_EQUAL(tm_queue_submit(queue.q, ops, 3), 0); // tags 8, 9, 8
    CHECK_EQUAL(queue.wait(8).bytes, 2 * BLOCK);
    CHECK_EQUAL(queue.wait(9).bytes, BLOCK);
    CHECK(queue.counters().wanted_ns > idle.wanted_ns);
}

int main() {
    RUN(a_bucket_begins_where_the_one_before_ends);
    for (int engine : find_engines()) {
        RUN(every_block_in_full_is_counted_once, engine);
        RUN(a_time_is_that_of_the_block, engine);
        RUN(clocks_stand_still_when_nothing_is_wanted, engine);
        RUN(a_refused_submission_starts_no_clock, engine);
    }
}
