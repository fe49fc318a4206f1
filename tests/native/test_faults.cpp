// Does every lie that an engine can tell end in the right bytes, or in an error that names the block?

#include "fixture.h"

static const uint64_t BLOCK = 16384;
static const uint64_t BYTES = 10 * BLOCK;

// Writes and reads BYTES with the faults in force for both, and compares.
static tm_counters survive(int engine, bool is_direct, uint32_t depth, const std::vector<tm_fault> &faults) {
    File file(is_direct);
    Memory out(BYTES), in(BYTES);
    out.fill(4);
    file.set_size(BYTES);
    Queue writer(engine, depth, BLOCK, faults);
    CHECK_EQUAL(writer.opened, 0);
    const tm_answer written = writer.transfer(op_of(TM_WRITE, file, out.data, BYTES, 0, 1));
    CHECK_EQUAL(written.error, 0);
    CHECK_EQUAL(written.bytes, BYTES);
    Queue reader(engine, depth, BLOCK, faults);
    const tm_answer read = reader.transfer(op_of(TM_READ, file, in.data, BYTES, 0, 1));
    CHECK_EQUAL(read.error, 0);
    CHECK_EQUAL(read.bytes, BYTES);
    CHECK(memcmp(out.data, in.data, BYTES) == 0);
    return reader.counters();
}

static void a_short_transfer_is_finished(int engine, bool is_direct, uint64_t bytes, uint32_t repeat) {
    const tm_counters counters = survive(engine, is_direct, 4, {{2, bytes, TM_FAULT_SHORT, repeat}});
    CHECK(counters.resumed >= 1);
    CHECK_EQUAL(counters.blocks, BYTES / BLOCK);
}

static void an_interrupted_block_is_pushed_again(int engine, int error) {
    const tm_counters counters = survive(engine, true, 4, {{1, (uint64_t)error, TM_FAULT_ERROR, 5}});
    CHECK_EQUAL(counters.resumed, 5);
}

static void a_refused_block_waits_its_turn(int engine, uint32_t depth) {
    survive(engine, true, depth, {{0, 0, TM_FAULT_REFUSED, 3}, {7, 0, TM_FAULT_REFUSED, 20}});
}

static void late_completions_arrive_out_of_order(int engine) {
    survive(engine, true, 4, {{0, 3, TM_FAULT_LATE, 0}, {5, 1, TM_FAULT_LATE, 2}});
    survive(engine, true, 4, {{0, 1000, TM_FAULT_LATE, 100}}); // later than anything: released when idle
    survive(engine, true, 1, {{0, 5, TM_FAULT_LATE, 3}});
}

static void faults_mix(int engine) {
    survive(engine, true, 4,
            {{0, 3, TM_FAULT_LATE, 0},
             {0, 4096, TM_FAULT_SHORT, 2},
             {3, EINTR, TM_FAULT_ERROR, 2},
             {5, 0, TM_FAULT_REFUSED, 4},
             {8, 5000, TM_FAULT_SHORT, 3}});
}

static void an_error_is_kept_and_the_rest_is_dropped(int engine, int kind, int error) {
    File file(true);
    file.set_size(BYTES);
    Memory memory(BYTES);
    Queue queue(engine, 1, BLOCK, {{3, (uint64_t)error, TM_FAULT_ERROR, 1}});
    const tm_answer answer = queue.transfer(op_of(kind, file, memory.data, BYTES, 0, 1));
    CHECK_EQUAL(answer.error, error);
    CHECK_EQUAL(answer.kind, kind);
    CHECK_EQUAL(answer.fd, file.fd);
    CHECK_EQUAL(answer.offset, 3 * BLOCK);
    CHECK_EQUAL(answer.length, BLOCK);
    CHECK_EQUAL(answer.bytes, 3 * BLOCK);
    CHECK_EQUAL(queue.counters().blocks, 4);
    CHECK_EQUAL(queue.transfer(op_of(kind, file, memory.data, BYTES, 0, 1)).error, 0); // the queue lives on
}

static void an_error_of_one_tag_spares_the_others(int engine) {
    File file(true);
    file.set_size(BYTES);
    Memory memory(BYTES);
    Queue queue(engine, 4, BLOCK, {{0, ENOSPC, TM_FAULT_ERROR, 1}});
    const tm_op ops[] = {op_of(TM_WRITE, file, memory.data, 2 * BLOCK, 0, 1, TM_URGENT),
                         op_of(TM_WRITE, file, memory.data + 2 * BLOCK, 8 * BLOCK, 2 * BLOCK, 2)};
    CHECK_EQUAL(tm_queue_submit(queue.q, ops, 2), 0);
    CHECK_EQUAL(queue.wait(1).error, ENOSPC); // first, since waiting for the other would put it in front
    CHECK_EQUAL(queue.wait(2).error, 0);
}

static void endless_faults_end_in_an_error(int engine) {
    File file(true);
    file.set_size(BYTES);
    Memory memory(BYTES);
    Queue starving(engine, 4, BLOCK, {{0, EAGAIN, TM_FAULT_ERROR, UINT32_MAX}});
    CHECK_EQUAL(starving.transfer(op_of(TM_WRITE, file, memory.data, BLOCK, 0, 1)).error, EAGAIN);
    Queue shortened(engine, 4, BLOCK, {{0, 100, TM_FAULT_SHORT, UINT32_MAX}});
    CHECK_EQUAL(shortened.transfer(op_of(TM_WRITE, file, memory.data, BLOCK, 0, 1)).error, file.is_direct ? EIO : 0);
    Queue empty(engine, 4, BLOCK, {{0, 0, TM_FAULT_SHORT, 1}});
    CHECK_EQUAL(empty.transfer(op_of(TM_READ, file, memory.data, BLOCK, 0, 1)).error, ENODATA);
}

static void a_failing_sync_is_an_error(int engine) {
    File file(true);
    Queue queue(engine, 4, BLOCK, {{0, EIO, TM_FAULT_ERROR, 1}});
    const tm_answer answer = queue.transfer(op_of(TM_SYNC, file, nullptr, 0, 0, 1));
    CHECK_EQUAL(answer.error, EIO);
    CHECK_EQUAL(answer.kind, TM_SYNC);
    CHECK_EQUAL(answer.length, 0);
    CHECK_EQUAL(queue.transfer(op_of(TM_SYNC, file, nullptr, 0, 0, 1)).error, 0);
}

static void close_counts_errors_nobody_waited_for(int engine) {
    File file(true);
    file.set_size(BYTES);
    Memory memory(BYTES);
    Queue queue(engine, 4, BLOCK, {{0, EIO, TM_FAULT_ERROR, 1}, {1, 2, TM_FAULT_LATE, 4}});
    const tm_op ops[] = {op_of(TM_WRITE, file, memory.data, BLOCK, 0, 1),
                         op_of(TM_WRITE, file, memory.data + BLOCK, 9 * BLOCK, BLOCK, 2)};
    CHECK_EQUAL(tm_queue_submit(queue.q, ops, 2), 0);
    CHECK_EQUAL(queue.close(), 1);
}

int main() {
    for (int engine : find_engines()) {
        for (uint64_t bytes : {4096, 8192, 5000, 100, 12289}) {
            RUN(a_short_transfer_is_finished, engine, true, bytes, 1);
            RUN(a_short_transfer_is_finished, engine, true, bytes, 3);
            RUN(a_short_transfer_is_finished, engine, false, bytes, 3);
        }
        RUN(an_interrupted_block_is_pushed_again, engine, EINTR);
        RUN(an_interrupted_block_is_pushed_again, engine, EAGAIN);
        RUN(a_refused_block_waits_its_turn, engine, 1);
        RUN(a_refused_block_waits_its_turn, engine, 4);
        RUN(late_completions_arrive_out_of_order, engine);
        RUN(faults_mix, engine);
        for (int error : {EIO, ENOSPC, EDQUOT})
            for (int kind : {TM_READ, TM_WRITE})
                RUN(an_error_is_kept_and_the_rest_is_dropped, engine, kind, error);
        RUN(an_error_of_one_tag_spares_the_others, engine);
        RUN(endless_faults_end_in_an_error, engine);
        RUN(a_failing_sync_is_an_error, engine);
        RUN(close_counts_errors_nobody_waited_for, engine);
    }
}
