// Do the options of a queue change how blocks reach the kernel, and never which bytes arrive?

#include "fixture.h"

static const uint64_t BLOCK = 16384;
static const uint32_t BOTH = TM_QUEUE_SINGLE_SUBMIT | TM_QUEUE_NO_OVERLAP;

// Two files, of which one may be registered, and sizes that cut, fill and exceed a wave.
static void bytes_are_the_same(int engine, uint32_t flags, bool is_registered) {
    File first(true), second(true);
    const uint64_t sizes[] = {4096, BLOCK, BLOCK + 4096, 4 * BLOCK, 4 * BLOCK + 4096, 23 * BLOCK};
    Memory out(1 << 20), in(1 << 20);
    out.fill(5);
    const std::vector<int32_t> files = is_registered ? std::vector<int32_t>{second.fd} : std::vector<int32_t>{};
    Queue queue(engine, 4, BLOCK, {}, &out, flags, files);
    CHECK_EQUAL(queue.opened, 0);
    uint64_t offset = 0, tag = 1;
    for (uint64_t size : sizes) {
        for (const File *file : {&first, &second}) {
            CHECK_EQUAL(queue.transfer(op_of(TM_WRITE, *file, out.data + offset, size, offset, tag++)).error, 0);
            CHECK_EQUAL(queue.transfer(op_of(TM_READ, *file, in.data, size, offset, tag++)).bytes, size);
            CHECK(memcmp(out.data + offset, in.data, size) == 0);
        }
        offset += size;
    }
    CHECK_EQUAL(queue.transfer(op_of(TM_SYNC, second, nullptr, 0, 0, tag)).error, 0);
}

static void faults_are_survived(int engine, uint32_t flags) {
    File file(true);
    const uint64_t bytes = 10 * BLOCK;
    Memory out(bytes), in(bytes);
    out.fill(6);
    const std::vector<tm_fault> faults = {{0, 3, TM_FAULT_LATE, 0},
                                          {0, 4096, TM_FAULT_SHORT, 2},
                                          {3, EINTR, TM_FAULT_ERROR, 2},
                                          {5, 0, TM_FAULT_REFUSED, 4},
                                          {8, 5000, TM_FAULT_SHORT, 3}};
    Queue writer(engine, 4, BLOCK, faults, nullptr, flags), reader(engine, 4, BLOCK, faults, nullptr, flags);
    CHECK_EQUAL(writer.transfer(op_of(TM_WRITE, file, out.data, bytes, 0, 1)).error, 0);
    CHECK_EQUAL(reader.transfer(op_of(TM_READ, file, in.data, bytes, 0, 1)).error, 0);
    CHECK(memcmp(out.data, in.data, bytes) == 0);
}

// Reads from the page cache end inside the call that hands them over, so batches need few calls.
static uint64_t count_entries(int engine, uint32_t flags, uint64_t num_blocks) {
    File file(false);
    Memory memory(num_blocks * BLOCK);
    Queue writer(engine, 64, BLOCK);
    CHECK_EQUAL(writer.transfer(op_of(TM_WRITE, file, memory.data, memory.bytes, 0, 1)).error, 0);
    Queue reader(engine, 64, BLOCK, {}, nullptr, flags);
    CHECK_EQUAL(reader.transfer(op_of(TM_READ, file, memory.data, memory.bytes, 0, 1)).error, 0);
    CHECK_EQUAL(reader.counters().blocks, num_blocks);
    return reader.counters().kernel_entries;
}

static void single_submit_enters_the_kernel_for_each_block(int engine) {
    CHECK(count_entries(engine, TM_QUEUE_SINGLE_SUBMIT, 256) >= 256);
    if (engine != TM_ENGINE_THREADS) // which cannot do otherwise
        CHECK(count_entries(engine, 0, 256) <= 256 / 4);
}

// Completions out of order, and a last wave that is not full.
static void waves_begin_when_the_one_before_ended(int engine, uint32_t flags) {
    File file(true);
    const uint64_t num_blocks = 43, depth = 4;
    Memory memory(num_blocks * BLOCK);
    file.set_size(memory.bytes);
    Queue queue(engine, depth, BLOCK, {{0, 1000, TM_FAULT_LATE, 1}, {9, 1, TM_FAULT_LATE, 1}}, nullptr, flags);
    std::vector<tm_op> ops;
    for (uint64_t i = 0; i < num_blocks; ++i)
        ops.push_back(op_of(TM_READ, file, memory.data + i * BLOCK, BLOCK, i * BLOCK, i));
    CHECK_EQUAL(tm_queue_submit(queue.q, ops.data(), (uint32_t)num_blocks), 0);
    std::vector<tm_answer> answers(num_blocks);
    for (uint64_t i = 0; i < num_blocks; ++i)
        while (tm_queue_wait(queue.q, i, 0, &answers[i]) != 0) // a look, which raises no priority
            usleep(100);
    for (uint64_t i = depth; i < num_blocks; ++i)
        for (uint64_t earlier = 0; earlier < i / depth * depth; ++earlier)
            CHECK(answers[earlier].finished_ns <= answers[i].started_ns);
}

// A read of an empty pipe ends when the test wants it to; io_uring alone waits for one without standing still.
static void a_block_that_takes_long_holds_up_its_wave_alone(uint32_t flags) {
    File file(true);
    int ends[2];
    CHECK_EQUAL(pipe(ends), 0);
    const uint64_t num_blocks = 9;
    Memory memory(num_blocks * BLOCK);
    file.set_size(memory.bytes);
    Queue queue(TM_ENGINE_URING, 2, BLOCK, {}, nullptr, flags);
    std::vector<tm_op> ops;
    for (uint64_t i = 0; i < num_blocks; ++i)
        ops.push_back(op_of(TM_READ, file, memory.data + i * BLOCK, BLOCK, i * BLOCK, i));
    ops[0].fd = ends[0];
    CHECK_EQUAL(tm_queue_submit(queue.q, ops.data(), (uint32_t)num_blocks), 0);
    const bool is_in_waves = (flags & TM_QUEUE_NO_OVERLAP) != 0;
    CHECK_EQUAL(queue.wait(1).error, 0);
    for (uint64_t i = 2; !is_in_waves && i < num_blocks; ++i)
        CHECK_EQUAL(queue.wait(i).error, 0); // past the one that takes long
    tm_answer answer;
    CHECK_EQUAL(tm_queue_wait(queue.q, 0, 0, &answer), -ETIMEDOUT);
    CHECK_EQUAL(queue.counters().blocks, is_in_waves ? 1 : num_blocks - 1);
    CHECK_EQUAL(write(ends[1], memory.data, BLOCK), BLOCK);
    CHECK_EQUAL(queue.wait(0).error, 0);
    for (uint64_t i = 2; is_in_waves && i < num_blocks; ++i)
        CHECK_EQUAL(queue.wait(i).error, 0);
    close(ends[0]);
    close(ends[1]);
}

static void files_that_cannot_be_registered_are_used_unregistered(int engine) {
    File file(true);
    Memory memory(BLOCK);
    Queue queue(engine, 4, BLOCK, {}, nullptr, 0, {file.fd, 1000});
    CHECK_EQUAL(queue.opened, 0);
    if (engine == TM_ENGINE_URING)
        CHECK(strstr(queue.why, "2 files not registered: Bad file descriptor"));
    CHECK_EQUAL(queue.transfer(op_of(TM_WRITE, file, memory.data, BLOCK, 0, 1)).error, 0);
    Queue twice(engine, 4, BLOCK, {}, &memory, 0, {file.fd, file.fd});
    if (engine == TM_ENGINE_URING)
        CHECK(strstr(twice.why, "buffers registered, 1 file registered"));
    CHECK_EQUAL(twice.transfer(op_of(TM_READ, file, memory.data, BLOCK, 0, 1)).error, 0);
}

static void bad_options_are_refused() {
    CHECK_EQUAL(Queue(TM_ENGINE_AUTO, 4, 4096, {}, nullptr, 4).opened, -EINVAL);
    CHECK_EQUAL(Queue(TM_ENGINE_AUTO, 4, 4096, {}, nullptr, 0, {-1}).opened, -EINVAL);
    tm_queue_options options = {};
    options.depth = 4;
    options.block_bytes = 4096;
    options.num_files = 1;
    tm_queue *queue;
    CHECK_EQUAL(tm_queue_open(&options, &queue, nullptr, nullptr, 0), -EINVAL);
}

int main() {
    RUN(bad_options_are_refused);
    for (int engine : find_engines()) {
        for (uint32_t flags : {0u, (uint32_t)TM_QUEUE_SINGLE_SUBMIT, (uint32_t)TM_QUEUE_NO_OVERLAP, BOTH}) {
            RUN(bytes_are_the_same, engine, flags, false);
            RUN(bytes_are_the_same, engine, flags, true);
            RUN(faults_are_survived, engine, flags);
            if (flags & TM_QUEUE_NO_OVERLAP)
                RUN(waves_begin_when_the_one_before_ended, engine, flags);
            if (engine == TM_ENGINE_URING)
                RUN(a_block_that_takes_long_holds_up_its_wave_alone, flags);
        }
        RUN(single_submit_enters_the_kernel_for_each_block, engine);
        RUN(files_that_cannot_be_registered_are_used_unregistered, engine);
    }
}
