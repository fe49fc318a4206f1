// bare_mixed: the yardstick of an optimizer step. The least that reads and writes a file at once: one io_uring, blocks
// kept in flight both ways from registered memory over huge pages, nothing else. Prints one line of seconds per round.
//
//     bare_mixed FILE read_bytes write_bytes [rounds, 3] [block KiB, 1024] [depth each way, 16]
//
// FILE exists and is at least as long as the larger of the two; its content is overwritten.

#include <algorithm>
#include <liburing.h>
#include <time.h>

#include "fixture.h"

static double now_s() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

// One direction: blocks in order, each in its own piece of memory.
struct Stream {
    bool is_write;
    uint64_t bytes;
    uint64_t issued = 0;
    uint64_t ended = 0;
    std::vector<unsigned> free_slots = {};
};

static void issue(io_uring *ring, Stream *stream, int fd, const Memory &memory, uint64_t block) {
    while (stream->issued < stream->bytes && !stream->free_slots.empty()) {
        const unsigned slot = stream->free_slots.back();
        stream->free_slots.pop_back();
        const uint64_t offset = stream->issued;
        const unsigned length = (unsigned)std::min(block, stream->bytes - offset);
        io_uring_sqe *sqe = io_uring_get_sqe(ring);
        if (stream->is_write)
            io_uring_prep_write_fixed(sqe, fd, memory.data + slot * block, length, offset, 0);
        else
            io_uring_prep_read_fixed(sqe, fd, memory.data + slot * block, length, offset, 0);
        sqe->user_data = ((uint64_t)stream->is_write << 32) | slot;
        stream->issued += length;
    }
}

static double run(io_uring *ring, int fd, const Memory &memory, uint64_t reads, uint64_t writes, uint64_t block,
                  unsigned depth) {
    Stream streams[2] = {{false, reads}, {true, writes}};
    for (unsigned slot = 0; slot < depth; ++slot) {
        streams[0].free_slots.push_back(slot);
        streams[1].free_slots.push_back(depth + slot);
    }
    const double begin = now_s();
    while (streams[0].ended < reads || streams[1].ended < writes) {
        issue(ring, &streams[0], fd, memory, block);
        issue(ring, &streams[1], fd, memory, block);
        CHECK(io_uring_submit_and_wait(ring, 1) >= 0);
        io_uring_cqe *cqe;
        while (io_uring_peek_cqe(ring, &cqe) == 0) {
            CHECK(cqe->res > 0);
            Stream *stream = &streams[cqe->user_data >> 32];
            stream->ended += (uint64_t)cqe->res;
            stream->free_slots.push_back((unsigned)cqe->user_data);
            io_uring_cqe_seen(ring, cqe);
        }
    }
    return now_s() - begin;
}

int main(int argc, char **argv) {
    CHECK(argc >= 4);
    const uint64_t reads = strtoull(argv[2], nullptr, 10), writes = strtoull(argv[3], nullptr, 10);
    const int rounds = argc > 4 ? atoi(argv[4]) : 3;
    const uint64_t block = (argc > 5 ? strtoull(argv[5], nullptr, 10) : 1024) << 10;
    const unsigned depth = argc > 6 ? (unsigned)atoi(argv[6]) : 16;
    const int fd = open(argv[1], O_RDWR | O_DIRECT);
    CHECK(fd >= 0);
    Memory memory(2 * depth * block);
    CHECK_EQUAL(tm_map_commit(memory.data, memory.bytes), 0);
    io_uring ring;
    CHECK_EQUAL(io_uring_queue_init(2 * depth, &ring, IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN), 0);
    iovec region = {memory.data, memory.bytes};
    CHECK_EQUAL(io_uring_register_buffers(&ring, &region, 1), 0);
    for (int round = 0; round < rounds; ++round)
        printf("%.6f\n", run(&ring, fd, memory, reads, writes, block, depth));
    io_uring_queue_exit(&ring);
    close(fd);
}
