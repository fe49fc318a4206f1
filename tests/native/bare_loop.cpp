// bare_loop: the yardstick of I/O. The least that moves blocks between a file and memory: one io_uring made for one
// thread, blocks kept in flight from registered memory over huge pages, a registered file, nothing else.
//
//     bare_loop FILE          commands on stdin, one a line, so that a benchmark can take turns with what it judges
//
//     read   BLOCK DEPTH BYTES                     the file in order, from the start again at its end
//     write  BLOCK DEPTH BYTES
//     mixed  BLOCK DEPTH READ_BYTES WRITE_BYTES    both at once, DEPTH each way; writes run half a file ahead of reads
//     spread BLOCK DEPTH READ_BYTES WRITE_BYTES    as mixed, each direction in both halves of the file in turn, which
//     some
//                                                  disks are faster with
//     through BLOCK DEPTH READ_BYTES WRITE_BYTES   as spread, with what is read: this thread adds to it, and writes
//     from
//                                                  the same memory; as a step of an optimizer does, without arithmetic
//     random BLOCK DEPTH BYTES SEED                single blocks at random places, read
//     quit
//
// Each is answered by one line: seconds, and the user and system CPU seconds of this process meanwhile. What fails is
// answered by a line that begins with `error`, and ends the program with status 1. FILE exists, on a file system that
// takes O_DIRECT; what it holds is overwritten by `write`, `mixed`, `spread` and `through`. Sizes are bytes.

#include <algorithm>
#include <errno.h>
#include <fcntl.h>
#include <liburing.h>
#include <memory>
#include <stdarg.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>
#include <vector>

#include "check.h"
#include "tiermem.h"

__attribute__((noreturn, format(printf, 1, 2))) static void fail(const char *format, ...) {
    va_list values;
    va_start(values, format);
    printf("error ");
    vprintf(format, values);
    printf("\n");
    va_end(values);
    exit(1);
}

static void demand(int answer, const char *what) {
    if (answer < 0)
        fail("%s: %s", what, strerror(-answer));
}

// ---- a ring and its memory ------------------------------------------------------------------------

// `num_slots` places of one block each.
class Ring {
  public:
    const uint64_t block;
    const unsigned num_slots;
    io_uring uring;

    Ring(int fd, uint64_t block, unsigned num_slots) : block(block), num_slots(num_slots) {
        void *base = nullptr;
        demand(tm_map_open(bytes(), &base), "reserving memory");
        memory_ = (char *)base;
        demand(tm_map_commit(base, bytes()), "memory");
        Numbers numbers{block};
        for (uint64_t i = 0; i < bytes(); i += 8) { // no disk may take a short cut for zeros
            const uint64_t number = numbers.next();
            memcpy(memory_ + i, &number, 8);
        }
        int answer = io_uring_queue_init(num_slots, &uring, IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN);
        if (answer == -EINVAL) // kernels before 6.1
            answer = io_uring_queue_init(num_slots, &uring, 0);
        demand(answer, "io_uring_setup");
        io_uring_register_ring_fd(&uring); // older kernels refuse, and that is all
        demand(io_uring_register_files(&uring, &fd, 1), "registering the file");
        register_memory();
    }
    ~Ring() {
        io_uring_queue_exit(&uring);
        tm_map_close(memory_, bytes());
    }
    Ring(const Ring &) = delete;

    // Reads and writes every byte of a block.
    void touch(unsigned slot) {
        uint64_t *words = (uint64_t *)(memory_ + slot * block);
        for (uint64_t i = 0; i < block / sizeof *words; ++i)
            ++words[i];
    }

    void push(bool is_write, unsigned slot, unsigned length, uint64_t offset) {
        io_uring_sqe *sqe = io_uring_get_sqe(&uring);
        if (!sqe)
            fail("the ring is full");
        char *place = memory_ + slot * block;
        const int piece = (int)(slot / slots_per_piece());
        if (is_registered_ && is_write) // file 0 of those registered
            io_uring_prep_write_fixed(sqe, 0, place, length, offset, piece);
        else if (is_registered_)
            io_uring_prep_read_fixed(sqe, 0, place, length, offset, piece);
        else if (is_write)
            io_uring_prep_write(sqe, 0, place, length, offset);
        else
            io_uring_prep_read(sqe, 0, place, length, offset);
        sqe->flags |= IOSQE_FIXED_FILE;
        sqe->user_data = slot;
    }

  private:
    char *memory_;
    bool is_registered_ = false;

    uint64_t bytes() const { return (block * num_slots + 4095) / 4096 * 4096; }

    // The kernel registers at most 1 GiB in one piece, and no block may lie in two.
    unsigned slots_per_piece() const { return (unsigned)std::max<uint64_t>(1, (1ull << 30) / block); }

    void register_memory() {
        std::vector<iovec> pieces;
        for (unsigned slot = 0; slot < num_slots; slot += slots_per_piece())
            pieces.push_back({memory_ + slot * block, std::min(slots_per_piece(), num_slots - slot) * block});
        const int answer = io_uring_register_buffers(&uring, pieces.data(), (unsigned)pieces.size());
        is_registered_ = answer == 0;
        if (answer < 0)
            fprintf(stderr, "bare_loop: %u blocks of %llu bytes not registered: %s\n", num_slots,
                    (unsigned long long)block, strerror(-answer));
    }
};

// ---- the loop -------------------------------------------------------------------------------------

// One direction.
struct Stream {
    bool is_write;
    uint64_t bytes;                       // to move
    uint64_t first = 0;                   // offset of the first block, when they go in order
    std::unique_ptr<Numbers> places = {}; // when they go at random
    uint64_t num_parts = 1;               // of the file, equal ones, from which they come in turn
    uint64_t issued = 0, ended = 0;
    std::vector<unsigned> free_slots = {};
};

// What is in a slot, to check its completion by.
struct Block {
    Stream *stream;
    uint64_t offset;
    unsigned length;
};

static uint64_t offset_in_order(const Stream &stream, uint64_t block, uint64_t file_bytes) {
    const uint64_t number = stream.issued / block, blocks_of_part = file_bytes / block / stream.num_parts;
    const uint64_t place = number % stream.num_parts * blocks_of_part + number / stream.num_parts;
    return (stream.first + place * block) % file_bytes;
}

static void issue(Ring *ring, Stream *stream, std::vector<Block> *blocks, uint64_t file_bytes) {
    while (stream->issued < stream->bytes && !stream->free_slots.empty()) {
        const unsigned slot = stream->free_slots.back();
        stream->free_slots.pop_back();
        const uint64_t offset = stream->places ? stream->places->next() % (file_bytes / ring->block) * ring->block
                                               : offset_in_order(*stream, ring->block, file_bytes);
        const unsigned length = (unsigned)std::min(ring->block, stream->bytes - stream->issued);
        (*blocks)[slot] = {stream, offset, length};
        ring->push(stream->is_write, slot, length, offset);
        stream->issued += length;
    }
}

// Which stream has a block's memory next: the one that is behind.
static Stream *next_of(std::vector<Stream> *streams) {
    Stream *reads = &(*streams)[0], *writes = &(*streams)[1];
    const double read = (double)reads->ended / (double)reads->bytes;
    const double written = (double)writes->issued / (double)writes->bytes;
    const bool writes_next = reads->issued == reads->bytes || (writes->issued < writes->bytes && written < read);
    return writes_next ? writes : reads;
}

static void end(Ring *ring, const io_uring_cqe *cqe, const std::vector<Block> &blocks, std::vector<Stream> *through) {
    const unsigned slot = (unsigned)cqe->user_data;
    const Block &block = blocks[slot];
    if (cqe->res != (int)block.length)
        fail("%s of %u bytes at offset %llu: %s", block.stream->is_write ? "write" : "read", block.length,
             (unsigned long long)block.offset, cqe->res < 0 ? strerror(-cqe->res) : "it ended short");
    block.stream->ended += block.length;
    if (through && !block.stream->is_write)
        ring->touch(slot);
    (through ? next_of(through) : block.stream)->free_slots.push_back(slot);
}

static void issue_all(Ring *ring, std::vector<Stream> *streams, std::vector<Block> *blocks, uint64_t file_bytes) {
    for (Stream &stream : *streams)
        issue(ring, &stream, blocks, file_bytes);
}

static void move(Ring *ring, std::vector<Stream> *streams, uint64_t file_bytes, bool goes_through) {
    std::vector<Block> blocks(ring->num_slots);
    for (unsigned slot = ring->num_slots; slot > 0; --slot) // each stream has an equal part, or the reads all
        (*streams)[goes_through ? 0 : (slot - 1) * streams->size() / ring->num_slots].free_slots.push_back(slot - 1);
    const auto has_ended = [](const Stream &stream) { return stream.ended == stream.bytes; };
    while (!std::all_of(streams->begin(), streams->end(), has_ended)) {
        issue_all(ring, streams, &blocks, file_bytes);
        demand(io_uring_submit_and_wait(&ring->uring, 1), "io_uring_enter");
        io_uring_cqe *cqe;
        unsigned head, num_seen = 0;
        io_uring_for_each_cqe(&ring->uring, head, cqe) {
            end(ring, cqe, blocks, goes_through ? streams : nullptr);
            ++num_seen;
            if (!goes_through)
                continue;
            issue_all(ring, streams, &blocks, file_bytes); // the disk goes on while the next block is touched
            demand(io_uring_submit(&ring->uring), "io_uring_enter");
        }
        io_uring_cq_advance(&ring->uring, num_seen);
    }
}

// ---- commands -------------------------------------------------------------------------------------

struct Clocks {
    double wall_s, user_s, system_s;
};

static Clocks read_clocks() {
    timespec now;
    rusage usage;
    clock_gettime(CLOCK_MONOTONIC, &now);
    getrusage(RUSAGE_SELF, &usage);
    return {(double)now.tv_sec + 1e-9 * (double)now.tv_nsec,
            (double)usage.ru_utime.tv_sec + 1e-6 * (double)usage.ru_utime.tv_usec,
            (double)usage.ru_stime.tv_sec + 1e-6 * (double)usage.ru_stime.tv_usec};
}

struct Command {
    char name[16];
    unsigned long long block = 0, depth = 0, bytes = 0, last = 0; // last: bytes to write, or a seed
};

static bool goes_through(const Command &c) { return !strcmp(c.name, "through"); }

static bool is_spread(const Command &c) { return !strcmp(c.name, "spread") || goes_through(c); }

static bool moves_both_ways(const Command &c) { return !strcmp(c.name, "mixed") || is_spread(c); }

static Command parse(const char *line) {
    Command c = {};
    const int num_words = sscanf(line, "%15s %llu %llu %llu %llu", c.name, &c.block, &c.depth, &c.bytes, &c.last);
    const bool is_plain = !strcmp(c.name, "read") || !strcmp(c.name, "write");
    const bool is_known = is_plain || moves_both_ways(c) || !strcmp(c.name, "random");
    if (!is_known || num_words != (is_plain ? 4 : 5))
        fail("read|write BLOCK DEPTH BYTES, mixed|spread|through BLOCK DEPTH READ_BYTES WRITE_BYTES, "
             "random BLOCK DEPTH BYTES SEED; given %.*s",
             (int)strcspn(line, "\n"), line);
    if (c.block == 0 || c.block > 1ull << 30 || c.depth == 0 || c.depth > 4096)
        fail("a block has 1 to 2^30 bytes, a depth is 1 to 4096; given %llu, %llu", c.block, c.depth);
    return c;
}

static std::vector<Stream> streams_of(const Command &c, uint64_t file_bytes) {
    std::vector<Stream> streams;
    if (moves_both_ways(c)) {
        streams.push_back({false, c.bytes});
        streams.push_back({true, c.last, file_bytes / c.block / 2 * c.block});
        for (Stream &stream : streams)
            stream.num_parts = is_spread(c) ? 2 : 1;
    } else if (!strcmp(c.name, "random")) {
        streams.push_back({false, c.bytes, 0, std::unique_ptr<Numbers>(new Numbers{c.last})});
    } else {
        streams.push_back({!strcmp(c.name, "write"), c.bytes});
    }
    return streams;
}

static void obey(const Command &c, int fd, std::unique_ptr<Ring> *ring) {
    struct stat file;
    demand(fstat(fd, &file) < 0 ? -errno : 0, "looking at the file");
    const uint64_t file_bytes = (uint64_t)file.st_size / c.block * c.block;
    if (file_bytes == 0)
        fail("a block of %llu bytes does not fit a file of %lld", c.block, (long long)file.st_size);
    std::vector<Stream> streams = streams_of(c, file_bytes);
    const unsigned num_slots = (unsigned)(c.depth * streams.size());
    if (!*ring || (*ring)->block != c.block || (*ring)->num_slots != num_slots) {
        ring->reset(); // before the next one: the kernel limits what both may register
        ring->reset(new Ring(fd, c.block, num_slots));
    }
    const Clocks before = read_clocks();
    move(ring->get(), &streams, file_bytes, goes_through(c));
    const Clocks after = read_clocks();
    printf("%.6f %.6f %.6f\n", after.wall_s - before.wall_s, after.user_s - before.user_s,
           after.system_s - before.system_s);
}

int main(int argc, char **argv) {
    setvbuf(stdout, nullptr, _IOLBF, 0); // who asks waits for the line
    if (argc != 2)
        fail("usage: bare_loop FILE, and commands on stdin");
    const int fd = open(argv[1], O_RDWR | O_DIRECT);
    demand(fd < 0 ? -errno : 0, argv[1]);
    std::unique_ptr<Ring> ring;
    char line[256];
    while (fgets(line, sizeof line, stdin) && strncmp(line, "quit", 4) != 0)
        obey(parse(line), fd, &ring);
    close(fd);
}
