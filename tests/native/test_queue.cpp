// Does every engine move the same bytes, and does the queue keep its promises on tags, order and ends?

#include <algorithm>
#include <atomic>
#include <filesystem>
#include <string>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <thread>

#include "bell.h"
#include "engine.h"
#include "fixture.h"

static const int64_t MS = 1000000;

static void bytes_written_are_bytes_read(int engine, bool is_direct, bool is_registered) {
    File file(is_direct);
    const uint64_t bytes = 5 << 20;
    Memory out(bytes), in(bytes);
    out.fill(1);
    Queue queue(engine, 8, 65536, {}, is_registered ? &out : nullptr);
    CHECK_EQUAL(queue.opened, 0);
    std::vector<uint64_t> sizes = {4096, 65536, 65536 + 4096, 3 << 20};
    if (!file.is_direct)
        sizes = {1, 511, 4095, 4096, 4097, 65535, 65536, 65537, 1000003};
    uint64_t offset = 0, tag = 100;
    for (uint64_t size : sizes) {
        CHECK_EQUAL(queue.transfer(op_of(TM_WRITE, file, out.data + offset, size, offset, tag++)).error, 0);
        offset += size;
    }
    CHECK_EQUAL(queue.transfer(op_of(TM_SYNC, file, nullptr, 0, 0, tag++)).error, 0);
    const tm_answer answer = queue.transfer(op_of(TM_READ, file, in.data, offset, 0, tag));
    CHECK_EQUAL(answer.error, 0);
    CHECK_EQUAL(answer.bytes, offset);
    CHECK(answer.submitted_ns <= answer.started_ns && answer.started_ns <= answer.finished_ns);
    CHECK(memcmp(out.data, in.data, offset) == 0);
    const tm_counters counters = queue.counters();
    CHECK_EQUAL(counters.read_bytes, offset);
    CHECK_EQUAL(counters.written_bytes, offset);
    CHECK_EQUAL(counters.resumed, 0);
    CHECK(counters.busy_ns > 0 && counters.kernel_entries > 0);
}

static void a_tag_of_many_ops_is_answered_once(int engine) {
    File file(true);
    const uint64_t part = 12288, num_parts = 50;
    Memory out(part * num_parts), in(part * num_parts);
    out.fill(2);
    Queue queue(engine, 3, 4096);
    std::vector<tm_op> ops;
    for (uint64_t i = 0; i < num_parts; ++i)
        ops.push_back(op_of(TM_WRITE, file, out.data + i * part, part, i * part, i % 2, (int)(i % 3)));
    CHECK_EQUAL(tm_queue_submit(queue.q, ops.data(), (uint32_t)ops.size()), 0);
    CHECK_EQUAL(queue.wait(1).bytes, part * num_parts / 2);
    CHECK_EQUAL(queue.wait(0).bytes, part * num_parts / 2);
    tm_answer answer;
    CHECK_EQUAL(tm_queue_wait(queue.q, 0, -1, &answer), -ENOENT);
    CHECK_EQUAL(queue.transfer(op_of(TM_READ, file, in.data, in.bytes, 0, 9)).error, 0);
    CHECK(memcmp(out.data, in.data, in.bytes) == 0);
}

static void malformed_ops_are_refused_and_nothing_is_taken(int engine) {
    File file(false);
    char byte = 0;
    Queue queue(engine, 4, 4096);
    const tm_op good = op_of(TM_WRITE, file, &byte, 1, 0, 5);
    std::vector<tm_op> bad(8, good);
    bad[0].length = 0;
    bad[1].buffer = nullptr;
    bad[2].fd = -1;
    bad[3].kind = 3;
    bad[4].priority = 3;
    bad[5].kind = -1;
    bad[6].offset = UINT64_MAX;
    bad[7].length = UINT64_MAX;
    for (tm_op &op : bad) {
        const tm_op both[] = {good, op};
        CHECK_EQUAL(tm_queue_submit(queue.q, both, 2), -EINVAL);
    }
    tm_answer answer;
    CHECK_EQUAL(tm_queue_wait(queue.q, 5, 0, &answer), -ENOENT);
    CHECK_EQUAL(tm_queue_submit(queue.q, &good, 1), 0);
    CHECK_EQUAL(tm_queue_submit(queue.q, &good, 1), -EEXIST);
    CHECK_EQUAL(queue.wait(5).error, 0);
    CHECK_EQUAL(queue.transfer(good).error, 0); // answered: the tag is free again
    CHECK_EQUAL(tm_queue_submit(queue.q, nullptr, 0), 0);
}

static void errors_of_the_kernel_name_the_block(int engine) {
    File file(true);
    file.set_size(8192);
    Memory memory(65536);
    Queue queue(engine, 4, 4096);
    tm_answer answer = queue.transfer(op_of(TM_READ, file, memory.data, 12288, 0, 1));
    CHECK_EQUAL(answer.error, ENODATA);
    CHECK_EQUAL(answer.offset, 8192);
    CHECK_EQUAL(answer.length, 4096);
    CHECK_EQUAL(answer.fd, file.fd);
    tm_op closed = op_of(TM_WRITE, file, memory.data, 4096, 0, 2);
    closed.fd = 1000;
    answer = queue.transfer(closed);
    CHECK_EQUAL(answer.error, EBADF);
    CHECK_EQUAL(answer.kind, TM_WRITE);
    closed.kind = TM_SYNC;
    CHECK_EQUAL(queue.transfer(closed).error, EBADF);
    CHECK_EQUAL(queue.transfer(op_of(TM_READ, file, memory.data, 8192, 0, 3)).error, 0);
}

static void a_file_that_ends_inside_a_sector_is_no_data(int engine, bool is_direct) {
    File file(is_direct);
    file.set_size(5000);
    Memory memory(65536);
    Queue queue(engine, 4, 16384);
    CHECK_EQUAL(queue.transfer(op_of(TM_READ, file, memory.data, 8192, 0, 1)).error, ENODATA);
}

// The most of eight blocks that were in flight at once, when each ends as late as it can.
static uint64_t most_at_once(Queue &queue, const File &file, tm_bell *bell, uint64_t most_bytes) {
    Memory memory(8 * 4096);
    std::vector<tm_op> ops;
    for (uint64_t tag = 0; tag < 8; ++tag)
        ops.push_back(op_of(TM_READ, file, memory.data + tag * 4096, 4096, tag * 4096, tag));
    CHECK_EQUAL(tm_queue_submit_ringing(queue.q, ops.data(), 8, bell, most_bytes), 0);
    std::vector<tm_answer> answers;
    for (const tm_op &op : ops)
        answers.push_back(queue.wait(op.tag));
    uint64_t most = 0;
    for (const tm_answer &each : answers) {
        const auto is_there = [&](const tm_answer &other) {
            return other.started_ns <= each.started_ns && each.started_ns < other.finished_ns;
        };
        most = std::max(most, (uint64_t)std::count_if(answers.begin(), answers.end(), is_there));
    }
    return most;
}

static void a_program_says_how_much_is_in_flight(int engine) {
    File file(false);
    file.set_size(8 * 4096);
    tm_bell bell;
    Queue queue(engine, 8, 4096, {{0, 1000, TM_FAULT_LATE, 1000}});
    CHECK_EQUAL(most_at_once(queue, file, &bell, 2 * 4096), 2);
    CHECK_EQUAL(most_at_once(queue, file, &bell, 1), 1);
    CHECK_EQUAL(most_at_once(queue, file, nullptr, 0), 8);
    char byte;
    const tm_op known = op_of(TM_READ, file, &byte, 1, 0, 1);
    const tm_op refused[] = {op_of(TM_READ, file, &byte, 1, 0, 2), known};
    CHECK_EQUAL(tm_queue_submit_ringing(queue.q, &known, 1, &bell, 1), 0);
    CHECK_EQUAL(tm_queue_submit_ringing(queue.q, refused, 2, &bell, 1), -EEXIST);
    CHECK_EQUAL(queue.wait(1).error, 0);
    CHECK_EQUAL(most_at_once(queue, file, nullptr, 0), 8);
}

static uint64_t slice_of(pid_t thread) {
    uint64_t attributes[6] = {}; // the fourth is the slice in ns
    return syscall(SYS_sched_getattr, thread, attributes, sizeof attributes, 0) == 0 ? attributes[3] : 0;
}

static void its_thread_has_the_slices_that_the_kernel_grants(int engine) {
    uint64_t granted = 0;
    std::thread([&granted] {
        tm_thread_wakes_soon();
        granted = slice_of(0);
    }).join();
    Queue queue(engine, 8, 4096);
    int num_found = 0;
    for (const auto &each : std::filesystem::directory_iterator("/proc/self/task"))
        num_found += slice_of(std::stoi(each.path().filename())) == granted;
    CHECK(num_found > 0);
    CHECK(granted <= slice_of(0));
}

// Late completions keep the only slots taken, so that the order of the rest can be seen.
static void promote_puts_a_tag_before_others(int engine) {
    File file(false);
    file.set_size(1 << 20);
    Memory memory(1 << 20);
    // One slot. The first 200 pushes are refused, which leaves time to promote.
    Queue queue(engine, 1, 4096, {{0, 0, TM_FAULT_REFUSED, 200}});
    std::vector<tm_op> ops;
    for (uint64_t tag = 0; tag < 4; ++tag)
        ops.push_back(op_of(TM_READ, file, memory.data + tag * 8192, 8192, 0, tag, TM_BACKGROUND));
    CHECK_EQUAL(tm_queue_submit(queue.q, ops.data(), 4), 0);
    CHECK_EQUAL(tm_queue_promote(queue.q, 3, TM_NORMAL), 0);
    CHECK_EQUAL(tm_queue_promote(queue.q, 2, TM_URGENT), 0);
    CHECK_EQUAL(tm_queue_promote(queue.q, 77, TM_URGENT), -ENOENT);
    CHECK_EQUAL(tm_queue_promote(queue.q, 3, 3), -EINVAL);
    tm_answer answers[4];
    for (uint64_t tag = 0; tag < 4; ++tag) {
        int result;
        while ((result = tm_queue_wait(queue.q, tag, 0, &answers[tag])) == -ETIMEDOUT)
            std::this_thread::yield();
        CHECK_EQUAL(result, 0);
    }
    CHECK(answers[2].finished_ns <= answers[3].finished_ns);
    CHECK(answers[3].finished_ns <= answers[1].finished_ns);
}

static void cancel_drops_what_the_kernel_does_not_have(int engine) {
    File file(false);
    file.set_size(1 << 20);
    Memory memory(1 << 20);
    Queue queue(engine, 1, 4096, {{0, 0, TM_FAULT_REFUSED, 200}});
    const tm_op ops[] = {op_of(TM_READ, file, memory.data, 4096, 0, 1),
                         op_of(TM_READ, file, memory.data + 8192, 1 << 16, 0, 2)};
    CHECK_EQUAL(tm_queue_submit(queue.q, ops, 2), 0);
    CHECK_EQUAL(tm_queue_cancel(queue.q, 2), 0);
    CHECK_EQUAL(tm_queue_cancel(queue.q, 3), -ENOENT);
    const tm_answer answer = queue.wait(2);
    CHECK_EQUAL(answer.error, ECANCELED);
    CHECK_EQUAL(answer.bytes, 0);
    CHECK_EQUAL(queue.wait(1).error, 0);
    CHECK_EQUAL(queue.counters().blocks, 1);
    CHECK_EQUAL(queue.close(), 0); // a cancelled tag is no error that was missed
}

static void wait_ends_at_its_timeout(int engine) {
    File file(false);
    file.set_size(4096);
    Memory memory(4096);
    Queue queue(engine, 1, 4096, {{0, 0, TM_FAULT_REFUSED, 200}});
    const tm_op op = op_of(TM_READ, file, memory.data, 4096, 0, 1);
    CHECK_EQUAL(tm_queue_submit(queue.q, &op, 1), 0);
    tm_answer answer;
    CHECK_EQUAL(tm_queue_wait(queue.q, 1, 0, &answer), -ETIMEDOUT);
    CHECK_EQUAL(tm_queue_wait(queue.q, 1, MS, &answer), -ETIMEDOUT);
    CHECK_EQUAL(tm_queue_wait(queue.q, 1, INT64_MAX, &answer), 0);
}

static void close_finishes_what_was_submitted(int engine) {
    File file(true);
    Memory out(1 << 20), in(1 << 20);
    out.fill(3);
    Queue writer(engine, 2, 4096);
    for (uint64_t tag = 0; tag < 16; ++tag) {
        const tm_op op = op_of(TM_WRITE, file, out.data + tag * 65536, 65536, tag * 65536, tag);
        CHECK_EQUAL(tm_queue_submit(writer.q, &op, 1), 0);
    }
    tm_op failing = op_of(TM_WRITE, file, out.data, 4096, 0, 99);
    failing.fd = 1000;
    CHECK_EQUAL(tm_queue_submit(writer.q, &failing, 1), 0);
    CHECK_EQUAL(writer.close(), 1);
    Queue reader(engine, 4, 65536);
    CHECK_EQUAL(reader.transfer(op_of(TM_READ, file, in.data, 1 << 20, 0, 1)).error, 0);
    CHECK(memcmp(out.data, in.data, 1 << 20) == 0);
}

static void many_threads_submit_and_wait(int engine) {
    File file(true);
    const uint64_t per_thread = 1 << 20;
    const int num_threads = 4, num_rounds = 8;
    file.set_size(per_thread * num_threads);
    Queue queue(engine, 8, 16384);
    std::vector<std::thread> threads;
    for (int t = 0; t < num_threads; ++t)
        threads.emplace_back([&, t] {
            Memory out(per_thread), in(per_thread);
            for (int round = 0; round < num_rounds; ++round) {
                out.fill((uint64_t)(t * 100 + round));
                const uint64_t tag = (uint64_t)(t * 1000 + round * 2), offset = per_thread * (uint64_t)t;
                CHECK_EQUAL(queue.transfer(op_of(TM_WRITE, file, out.data, per_thread, offset, tag)).error, 0);
                CHECK_EQUAL(queue.transfer(op_of(TM_READ, file, in.data, per_thread, offset, tag + 1)).error, 0);
                CHECK(memcmp(out.data, in.data, per_thread) == 0);
            }
        });
    for (std::thread &thread : threads)
        thread.join();
}

static void a_fork_is_refused_and_harms_nothing(int engine) {
    File file(false);
    char byte = 'x';
    Queue queue(engine, 4, 4096);
    const tm_op op = op_of(TM_WRITE, file, &byte, 1, 0, 1);
    const pid_t child = fork();
    if (child == 0) {
        tm_answer answer;
        tm_counters counters;
        const bool is_refused = tm_queue_submit(queue.q, &op, 1) == -EPIPE &&
                                tm_queue_wait(queue.q, 1, -1, &answer) == -EPIPE &&
                                tm_queue_promote(queue.q, 1, 0) == -EPIPE && tm_queue_cancel(queue.q, 1) == -EPIPE &&
                                tm_queue_counters(queue.q, &counters) == -EPIPE && tm_queue_close(queue.q) == -EPIPE;
        _exit(is_refused ? 0 : 1);
    }
    int status;
    CHECK_EQUAL(waitpid(child, &status, 0), child);
    CHECK_EQUAL(status, 0);
    CHECK_EQUAL(queue.transfer(op).error, 0);
}

static int count_fds() {
    int count = 0;
    for (int fd = 0; fd < 256; ++fd)
        count += fcntl(fd, F_GETFD) >= 0;
    return count;
}

static void close_leaves_no_file_descriptor(int engine) {
    const int before = count_fds();
    Queue queue(engine, 4, 4096);
    CHECK_EQUAL(queue.close(), 0);
    CHECK_EQUAL(count_fds(), before);
}

static void bad_options_are_refused() {
    CHECK_EQUAL(Queue(TM_ENGINE_AUTO, 0, 4096).opened, -EINVAL);
    CHECK_EQUAL(Queue(TM_ENGINE_AUTO, 4097, 4096).opened, -EINVAL);
    CHECK_EQUAL(Queue(TM_ENGINE_AUTO, 4, 0).opened, -EINVAL);
    CHECK_EQUAL(Queue(TM_ENGINE_AUTO, 4, 5000).opened, -EINVAL);
    CHECK_EQUAL(Queue(TM_NUM_ENGINES, 4, 4096).opened, -EINVAL);
    CHECK_EQUAL(Queue(-1, 4, 4096).opened, -EINVAL);
}

static void auto_takes_the_first_that_opens(int first) {
    Queue queue(TM_ENGINE_AUTO, 4, 4096);
    CHECK_EQUAL(queue.opened, 0);
    CHECK_EQUAL(queue.engine, first);
}

int main() {
    const std::vector<int> engines = find_engines();
    RUN(bad_options_are_refused);
    RUN(auto_takes_the_first_that_opens, engines[0]);
    for (int engine : engines) {
        RUN(bytes_written_are_bytes_read, engine, true, false);
        RUN(bytes_written_are_bytes_read, engine, true, true);
        RUN(bytes_written_are_bytes_read, engine, false, false);
        RUN(a_tag_of_many_ops_is_answered_once, engine);
        RUN(malformed_ops_are_refused_and_nothing_is_taken, engine);
        RUN(errors_of_the_kernel_name_the_block, engine);
        RUN(a_file_that_ends_inside_a_sector_is_no_data, engine, true);
        RUN(a_file_that_ends_inside_a_sector_is_no_data, engine, false);
        RUN(a_program_says_how_much_is_in_flight, engine);
        RUN(its_thread_has_the_slices_that_the_kernel_grants, engine);
        RUN(promote_puts_a_tag_before_others, engine);
        RUN(cancel_drops_what_the_kernel_does_not_have, engine);
        RUN(wait_ends_at_its_timeout, engine);
        RUN(close_finishes_what_was_submitted, engine);
        RUN(many_threads_submit_and_wait, engine);
        RUN(a_fork_is_refused_and_harms_nothing, engine);
        RUN(close_leaves_no_file_descriptor, engine);
    }
}
