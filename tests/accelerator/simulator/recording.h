// A recording: every operation, wait and host wait in the order in which the host issued them.
#pragma once

#include "streams.h"

#include <string>
#include <vector>

namespace sim {

struct Entry {
    enum Kind { OPERATION, STREAM_WAIT, HOST_WAIT, HOST_WORK };
    Kind kind;
    Label label;
    std::string lane;           // the lane of host work, which the caller names
    Mark place;                 // where an operation or a stream's wait stands
    Mark after;                 // what a stream or the host waits for
    std::vector<int64_t> needs; // entries that host work starts after
    bool blocks = false;        // host work that its thread waits for
    Thread thread = MAIN;
    int64_t thread_id = 0;
    double ran_s = 0; // how long an operation took, once it is done
};

/// Starts a recording, without what was recorded before, or stops it.
void record(bool is_on);
bool is_recording();
/// Returns the entry's number.
int64_t add_entry(Entry entry);
/// An operation that notes in its entry, which was just added, how long it took.
std::function<void()> timed(std::function<void()> run, int64_t number);
/// Adds work of the host (a disk read, a CPU kernel) in place. Returns its number, or -1 while nothing is recorded.
int64_t add_host_work(const std::string &name, const std::string &lane, uint64_t bytes, double flops,
                      const std::vector<int64_t> &needs, bool blocks);
std::vector<Entry> recorded();

} // namespace sim
