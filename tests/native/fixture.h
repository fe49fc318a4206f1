// fixture: a file to move blocks to and from, and a queue opened with defaults.
#ifndef TIERMEM_FIXTURE_H
#define TIERMEM_FIXTURE_H

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <string>
#include <unistd.h>
#include <vector>

#include "check.h"
#include "tiermem.h"

// An unnamed file in the working directory's file system (temporary folders may lack O_DIRECT).
struct File {
    int fd;
    bool is_direct = false;

    explicit File(bool wants_direct) {
        char name[] = "tiermem-test-XXXXXX";
        fd = mkstemp(name);
        CHECK(fd >= 0);
        if (wants_direct) {
            const int direct = open(name, O_RDWR | O_DIRECT);
            if (direct >= 0) {
                close(fd);
                fd = direct;
                is_direct = true;
            }
        }
        unlink(name);
    }
    ~File() { close(fd); }
    File(const File &) = delete;

    void set_size(uint64_t bytes) { CHECK(ftruncate(fd, (off_t)bytes) == 0); }
};

// Committed memory; freed at the end.
struct Memory {
    char *data;
    uint64_t bytes;

    explicit Memory(uint64_t asked) : bytes(asked) {
        void *base;
        CHECK_EQUAL(tm_map_open(bytes, &base), 0);
        data = (char *)base;
    }
    ~Memory() { CHECK_EQUAL(tm_map_close(data, bytes), 0); }
    Memory(const Memory &) = delete;

    void fill(uint64_t seed) {
        Numbers numbers{seed};
        for (uint64_t i = 0; i < bytes; ++i)
            data[i] = (char)numbers.next();
    }
};

struct Queue {
    tm_queue *q = nullptr;
    int32_t engine = 0;
    char why[512];
    int opened;
    bool is_open;

    Queue(int asked, uint32_t depth, uint64_t block_bytes, std::vector<tm_fault> faults = {},
          const Memory *region = nullptr, uint32_t flags = 0, std::vector<int32_t> files = {}) {
        tm_queue_options options = {};
        void *const starts[] = {region ? region->data : nullptr};
        const uint64_t sizes[] = {region ? region->bytes : 0};
        options.engine = asked;
        options.depth = depth;
        options.block_bytes = block_bytes;
        options.faults = faults.data();
        options.num_faults = (uint32_t)faults.size();
        options.num_regions = region ? 1 : 0;
        options.regions = starts;
        options.region_bytes = sizes;
        options.flags = flags;
        options.files = files.data();
        options.num_files = (uint32_t)files.size();
        opened = tm_queue_open(&options, &q, &engine, why, sizeof why);
        is_open = opened == 0;
    }
    ~Queue() {
        if (is_open)
            close();
    }
    Queue(const Queue &) = delete;

    int close() {
        is_open = false;
        return tm_queue_close(q);
    }
    tm_answer wait(uint64_t tag) {
        tm_answer answer;
        CHECK_EQUAL(tm_queue_wait(q, tag, -1, &answer), 0);
        return answer;
    }
    tm_answer transfer(tm_op op) {
        CHECK_EQUAL(tm_queue_submit(q, &op, 1), 0);
        return wait(op.tag);
    }
    tm_counters counters() {
        tm_counters counters;
        CHECK_EQUAL(tm_queue_counters(q, &counters), 0);
        return counters;
    }
};

inline tm_op op_of(int kind, const File &file, char *buffer, uint64_t length, uint64_t offset, uint64_t tag,
                   int priority = TM_NORMAL) {
    return {buffer, length, offset, tag, file.fd, kind, priority, 0};
}

// The engines that this machine opens; the others say why not.
inline std::vector<int> find_engines() {
    std::vector<int> engines;
    for (int engine = TM_ENGINE_AUTO + 1; engine < TM_NUM_ENGINES; ++engine) {
        Queue queue(engine, 4, 4096);
        printf("engine %d: %s\n", engine, queue.why);
        CHECK(queue.why[0] != 0);
        if (queue.is_open)
            engines.push_back(engine);
    }
    CHECK(!engines.empty());
    return engines;
}

#endif
