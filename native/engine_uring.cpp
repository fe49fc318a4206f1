// engine_uring: blocks go through one io_uring that belongs to the queue's thread.
//
// The ring is made on that thread, so the kernel may be told that nobody else submits and that
// completion work may wait until we ask (no interrupting of other threads). The wake-up is an eventfd
// with a read always waiting in the ring: one system call hands over new blocks and sleeps for all of them.
// Memory regions are registered when the kernel allows it, which saves pinning pages for every block; so are files,
// which saves counting references to them.

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "engine.h"

#ifdef TIERMEM_HAVE_URING

#include <algorithm>
#include <atomic>
#include <liburing.h>
#include <new>
#include <sys/eventfd.h>
#include <sys/vfs.h>
#include <unistd.h>
#include <vector>

namespace {

const uint64_t WAKE = UINT64_MAX;      // user data of the read on the eventfd
const uint64_t MAX_PIECE = 1ull << 30; // the kernel registers at most 1 GiB in one piece
const uint64_t MAX_PIECES = 1024;      // as few as any kernel takes
const unsigned SPARE_ENTRIES = 2;      // for the read on the eventfd

struct Region {
    uint64_t start, bytes;
    unsigned first_piece; // index of its first registered buffer
};

struct Uring {
    io_uring ring;
    int wake_fd = -1;
    uint64_t wake_count = 0; // where the kernel writes what the eventfd held
    bool is_wake_armed = false;
    std::atomic<uint64_t> kernel_entries{0};
    std::vector<Region> regions; // registered ones; empty when the kernel refused
    std::vector<int> files;      // registered descriptors in rising order, at their index; empty when it refused
};

} // namespace

static Uring *uring_of(tm_engine_state *state) { return reinterpret_cast<Uring *>(state); }

static int make_ring(unsigned entries, io_uring *ring) {
#if defined(IORING_SETUP_SINGLE_ISSUER) && defined(IORING_SETUP_DEFER_TASKRUN)
    io_uring_params params;
    memset(&params, 0, sizeof params);
    params.flags = IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN | IORING_SETUP_TASKRUN_FLAG;
    const int answer = io_uring_queue_init_params(entries, ring, &params);
    if (answer != -EINVAL)
        return answer;
#endif
    return io_uring_queue_init(entries, ring, 0); // kernels before 6.1 know none of these flags
}

static bool has_operations(io_uring *ring) {
    io_uring_probe *probe = io_uring_get_probe_ring(ring);
    if (!probe)
        return false;
    const bool has_all = io_uring_opcode_supported(probe, IORING_OP_READ) &&
                         io_uring_opcode_supported(probe, IORING_OP_WRITE) &&
                         io_uring_opcode_supported(probe, IORING_OP_FSYNC);
    io_uring_free_probe(probe);
    return has_all;
}

// Appends to a remark.
__attribute__((format(printf, 3, 4))) static void add_remark(char *why, uint32_t why_bytes, const char *format, ...) {
    const size_t used = strlen(why);
    const int between = snprintf(why + used, why_bytes - used, "%s", used ? ", " : "");
    const size_t begin = std::min<size_t>(used + (size_t)between, why_bytes - 1);
    va_list values;
    va_start(values, format);
    vsnprintf(why + begin, why_bytes - begin, format, values);
    va_end(values);
}

// Registers the regions in pieces; without success the engine goes on without, and `why` says so.
static void register_regions(Uring *engine, const tm_queue_options *options, char *why, uint32_t why_bytes) {
    std::vector<iovec> pieces;
    std::vector<Region> regions;
    uint64_t total = 0;
    for (uint32_t i = 0; i < options->num_regions; ++i) {
        char *start = (char *)options->regions[i];
        const uint64_t bytes = options->region_bytes[i];
        regions.push_back({(uint64_t)start, bytes, (unsigned)pieces.size()});
        for (uint64_t done = 0; done < bytes; done += MAX_PIECE)
            pieces.push_back({start + done, bytes - done < MAX_PIECE ? bytes - done : MAX_PIECE});
        total += bytes;
    }
    const double mib = (double)total / (1 << 20);
    if (pieces.size() > MAX_PIECES) {
        add_remark(why, why_bytes, "%.0f MiB of buffers not registered: more than %u GiB", mib, (unsigned)MAX_PIECES);
        return;
    }
    const int answer = io_uring_register_buffers(&engine->ring, pieces.data(), (unsigned)pieces.size());
    if (answer == 0) {
        engine->regions.swap(regions);
        add_remark(why, why_bytes, "%.0f MiB of buffers registered", mib);
    } else {
        const bool is_limit = answer == -ENOMEM || answer == -EPERM;
        add_remark(why, why_bytes, "%.0f MiB of buffers not registered: %s%s", mib, strerror(-answer),
                   is_limit ? " (see ulimit -l)" : "");
    }
}

// Without success the engine goes on without, and `why` says so.
static void register_files(Uring *engine, const tm_queue_options *options, char *why, uint32_t why_bytes) {
    std::vector<int> files(options->files, options->files + options->num_files);
    std::sort(files.begin(), files.end());
    files.erase(std::unique(files.begin(), files.end()), files.end());
    const unsigned num_files = (unsigned)files.size();
    const int answer = io_uring_register_files(&engine->ring, files.data(), num_files);
    const char *plural = num_files == 1 ? "" : "s";
    if (answer == 0) {
        engine->files.swap(files);
        add_remark(why, why_bytes, "%u file%s registered", num_files, plural);
    } else {
        add_remark(why, why_bytes, "%u file%s not registered: %s", num_files, plural, strerror(-answer));
    }
}

static void uring_free(Uring *engine) {
    if (engine->wake_fd >= 0)
        close(engine->wake_fd);
    delete engine;
}

static int open_ring(Uring *engine, const tm_queue_options *options, char *why, uint32_t why_bytes) {
    engine->wake_fd = eventfd(0, EFD_CLOEXEC);
    if (engine->wake_fd < 0) {
        const int error = errno;
        snprintf(why, why_bytes, "eventfd: %s", strerror(error));
        return -error;
    }
    const int answer = make_ring(options->depth + SPARE_ENTRIES, &engine->ring);
    if (answer < 0) {
        const char *hint = answer == -EPERM    ? " (kernel.io_uring_disabled, or a container forbids it)"
                           : answer == -ENOMEM ? " (see ulimit -l)"
                                               : "";
        snprintf(why, why_bytes, "io_uring_setup: %s%s", strerror(-answer), hint);
        return answer;
    }
    if (has_operations(&engine->ring)) {
        io_uring_register_ring_fd(&engine->ring); // saves a little in every call; older kernels refuse, and that is all
        return 0;
    }
    io_uring_queue_exit(&engine->ring);
    snprintf(why, why_bytes, "this kernel's io_uring lacks read, write or fsync (5.6 has them)");
    return -ENOSYS;
}

static void uring_close(tm_engine_state *state) {
    io_uring_queue_exit(&uring_of(state)->ring); // also ends the read on the eventfd
    uring_free(uring_of(state));
}

// Of a FUSE file that takes no part in the page cache (FOPEN_DIRECT_IO) nobody advances the position when a transfer
// ends short, and io_uring, which finishes short ones of regular files by itself, then moves the bytes of the wrong
// place and reports success (seen on Linux 6.18). No other engine does.
static bool has_fuse_file(const tm_queue_options *options) {
    const long fuse = 0x65735546;
    struct statfs facts;
    for (uint32_t i = 0; i < options->num_files; ++i)
        if (fstatfs(options->files[i], &facts) == 0 && (long)facts.f_type == fuse)
            return true;
    return false;
}

static int uring_open(const tm_queue_options *options, tm_engine_state **state, char *why, uint32_t why_bytes) {
    if (has_fuse_file(options)) {
        snprintf(why, why_bytes, "it would finish short transfers of FUSE files at the wrong place");
        return -EOPNOTSUPP;
    }
    Uring *engine = new (std::nothrow) Uring;
    if (!engine)
        return -ENOMEM;
    const int answer = open_ring(engine, options, why, why_bytes);
    if (answer < 0) {
        uring_free(engine);
        return answer;
    }
    *state = reinterpret_cast<tm_engine_state *>(engine);
    try {
        if (options->num_regions > 0)
            register_regions(engine, options, why, why_bytes);
        if (options->num_files > 0)
            register_files(engine, options, why, why_bytes);
    } catch (const std::bad_alloc &) {
        uring_close(*state);
        return -ENOMEM;
    }
    return 0;
}

// The registered buffer that holds the whole block, or -1.
static int find_piece(const Uring *engine, const tm_request *request) {
    const uint64_t begin = (uint64_t)request->buffer;
    for (const Region &region : engine->regions) {
        if (begin < region.start || begin + request->length > region.start + region.bytes)
            continue;
        const uint64_t piece = (begin - region.start) / MAX_PIECE;
        const uint64_t last = (begin - region.start + request->length - 1) / MAX_PIECE;
        return piece == last ? (int)(region.first_piece + piece) : -1;
    }
    return -1;
}

static void prepare_transfer(io_uring_sqe *sqe, const tm_request *request, int piece) {
    const bool is_read = request->kind == TM_READ;
    if (piece >= 0 && is_read)
        io_uring_prep_read_fixed(sqe, request->fd, request->buffer, request->length, request->offset, piece);
    else if (piece >= 0)
        io_uring_prep_write_fixed(sqe, request->fd, request->buffer, request->length, request->offset, piece);
    else if (is_read)
        io_uring_prep_read(sqe, request->fd, request->buffer, request->length, request->offset);
    else
        io_uring_prep_write(sqe, request->fd, request->buffer, request->length, request->offset);
}

// Names the file by its place in the registered table, if it is there.
static void use_registered_file(const Uring *engine, io_uring_sqe *sqe, int fd) {
    const auto found = std::lower_bound(engine->files.begin(), engine->files.end(), fd);
    if (found == engine->files.end() || *found != fd)
        return;
    sqe->fd = (int)(found - engine->files.begin());
    sqe->flags |= IOSQE_FIXED_FILE;
}

static tm_push uring_push(tm_engine_state *state, const tm_request *request, int64_t *) {
    Uring *engine = uring_of(state);
    io_uring_sqe *sqe = io_uring_get_sqe(&engine->ring);
    if (!sqe)
        return TM_PUSH_FULL;
    if (request->kind == TM_SYNC)
        io_uring_prep_fsync(sqe, request->fd, IORING_FSYNC_DATASYNC);
    else
        prepare_transfer(sqe, request, find_piece(engine, request));
    use_registered_file(engine, sqe, request->fd);
    sqe->user_data = request->slot;
    return TM_PUSH_QUEUED;
}

static void arm_wake(Uring *engine) {
    io_uring_sqe *sqe = io_uring_get_sqe(&engine->ring);
    if (!sqe)
        return; // blocks fill the ring: their completions wake us just as well
    io_uring_prep_read(sqe, engine->wake_fd, &engine->wake_count, sizeof engine->wake_count, 0);
    sqe->user_data = WAKE;
    engine->is_wake_armed = true;
}

static uint32_t collect(Uring *engine, tm_completion *completions, uint32_t max) {
    uint32_t count = 0;
    io_uring_cqe *cqe;
    if (io_uring_peek_cqe(&engine->ring, &cqe) != 0) // also lets the kernel do what it put off
        return 0;
    unsigned head, num_seen = 0;
    io_uring_for_each_cqe(&engine->ring, head, cqe) {
        if (cqe->user_data == WAKE)
            engine->is_wake_armed = false;
        else if (count == max)
            break;
        else
            completions[count++] = {(uint32_t)cqe->user_data, cqe->res};
        ++num_seen;
    }
    io_uring_cq_advance(&engine->ring, num_seen);
    return count;
}

static int uring_reap(tm_engine_state *state, tm_reap_mode mode, tm_completion *completions, uint32_t max) {
    Uring *engine = uring_of(state);
    if (!engine->is_wake_armed)
        arm_wake(engine);
    int answer = 0;
    if (mode == TM_REAP_WAIT || io_uring_sq_ready(&engine->ring) > 0) {
        answer = io_uring_submit_and_wait(&engine->ring, mode == TM_REAP_WAIT ? 1 : 0);
        engine->kernel_entries.fetch_add(1, std::memory_order_relaxed);
    }
    // These mean "later": what was not handed over stays in the ring for the next call.
    if (answer < 0 && answer != -EINTR && answer != -EAGAIN && answer != -EBUSY)
        return answer;
    return (int)collect(engine, completions, max);
}

static void uring_wake(tm_engine_state *state) {
    const uint64_t one = 1;
    // Fails only when the count is at its limit, and then the reader wakes anyway.
    const ssize_t written = write(uring_of(state)->wake_fd, &one, sizeof one);
    (void)written;
}

static uint64_t uring_kernel_entries(const tm_engine_state *state) {
    return reinterpret_cast<const Uring *>(state)->kernel_entries.load(std::memory_order_relaxed);
}

#else

static int uring_open(const tm_queue_options *, tm_engine_state **, char *why, uint32_t why_bytes) {
    snprintf(why, why_bytes, "built without liburing");
    return -ENOSYS;
}
static tm_push uring_push(tm_engine_state *, const tm_request *, int64_t *) { return TM_PUSH_FULL; }
static int uring_reap(tm_engine_state *, tm_reap_mode, tm_completion *, uint32_t) { return -ENOSYS; }
static void uring_wake(tm_engine_state *) {}
static uint64_t uring_kernel_entries(const tm_engine_state *) { return 0; }
static void uring_close(tm_engine_state *) {}

#endif

const tm_engine_functions tm_engine_uring = {"io_uring", uring_open,           uring_push,  uring_reap,
                                             uring_wake, uring_kernel_entries, uring_close, nullptr};
