// Streams: queues of operations that run when the schedule lets them, or when a thread waits for them.
//
//   issue ──> queue of the stream ──> run_until(mark)        by a thread that waits
//                                 ├─> run_if_possible(mark)  by the schedule, inside issue; never blocks
//                                 └─> serve(queue)           by a thread of the stream, where the schedule has such
//
// A stream runs one operation at a time, in order, on the thread that asks for it. No lock is held meanwhile, so that
// an operation may block (a collective), free tensors or take the GIL. A mark is a place in a stream; an event holds a
// mark, and an operation without a function waits for a mark of another stream.
#pragma once

#include <Python.h>
#include <c10/core/Stream.h>

#include <array>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>

namespace sim {

constexpr auto DEVICE_TYPE = c10::DeviceType::PrivateUse1;
constexpr int MAX_DEVICES = 16;

// ---- the context: what a process makes when it first uses a device -----------------------------------------------

/// Number of devices: TIERMEM_SIM_DEVICES, default 2. Makes no context.
int device_count();
/// Throws std::runtime_error in a process that was forked from one with a context, as CUDA does.
void use_context();
/// Whether this process has allocated, created a stream or registered memory.
bool has_context();
/// Whether this process is a fork of one that had a context: its devices are gone.
bool is_bad_fork();
void check_device(int64_t device);

/// Lets other threads have the GIL while this one blocks, if this one has it.
class WithoutGil {
  public:
    WithoutGil();
    WithoutGil(const WithoutGil &) = delete;
    WithoutGil &operator=(const WithoutGil &) = delete;
    ~WithoutGil();

  private:
    PyThreadState *const saved;
};

// ---- operations ----------------------------------------------------------------------------------------------------

/// A place in a stream: reached when `index` operations of it are done.
struct Mark {
    int device = 0;
    int64_t stream = 0;
    uint64_t index = 0;
};

/// What occupies which resource: the clock has a rate for each.
enum class Lane { NONE, COMPUTE, TO_DEVICE, TO_HOST, BETWEEN_DEVICES, COLLECTIVE };
const char *lane_name(Lane lane);

/// What a recording says of an operation.
struct Label {
    std::string name;
    Lane lane = Lane::NONE; // NONE: the simulator's own work, which is not recorded
    uint64_t bytes = 0;
    double flops = 0;
};

struct Operation {
    std::function<void()> run; // empty: waits for `after`
    std::optional<Mark> after;
    std::function<void()> run_elsewhere; // set where `run` blocks (a collective): asks a thread of its own to run it
};

/// Appends an operation to a stream, and runs what the schedule says. Never blocks.
Mark issue(const c10::Stream &stream, Operation operation, const Label &label = {});
/// The end of a stream as it is now.
Mark mark_of(const c10::Stream &stream);
/// Makes a stream wait for a mark. Does not block the host.
void make_wait(const c10::Stream &stream, const Mark &mark);

bool is_done(const Mark &mark);
/// What an event's or stream's query answers. While it answers no, a late schedule gives in after a number of queries.
bool query(const Mark &mark);
/// Runs a stream up to a mark, and what that depends on. Blocks. Is not counted as a host wait.
void run_until(const Mark &mark);
/// Runs all that was issued on a device. Blocks. Is not counted as a host wait.
void run_device(int device);
/// Blocks the host until a mark is reached: counted and recorded under `reason`. Throws the first error of an
/// operation.
void wait_on_host(const Mark &mark, const std::string &reason);
void wait_on_host_for_device(int device, const std::string &reason);
/// Throws the first error of an operation that no host wait has reported.
void throw_failure();

// ---- streams --------------------------------------------------------------------------------------------------------

/// One of the 32 streams that a program gets when it makes one, in turn.
c10::Stream stream_of_pool(int device);
/// A stream that nobody else gets.
c10::Stream stream_of_its_own(int device);
c10::Stream default_stream(int device);
c10::Stream current_stream(int device);
/// Makes a stream the thread's current one of its device; returns the one before.
c10::Stream set_current_stream(const c10::Stream &stream);
int current_device();
void set_current_device(int device);
inline c10::Device device_of(int index) { return {DEVICE_TYPE, static_cast<c10::DeviceIndex>(index)}; }

// ---- schedules and counts
// ---------------------------------------------------------------------------------------------

enum class Schedule { AT_ONCE, LATE, MAIN_FIRST, SIDE_FIRST, RANDOM, THREADS };
/// Streams run each operation when it is issued, as late as a thread waits, or at random by a seed. Or the default
/// stream of each device runs at once and all others late, or the other way round: a wait that one of them misses is
/// seen. THREADS: each stream has a thread, which runs its operations while the host goes on: for measured times.
void set_schedule(Schedule schedule, uint64_t seed);
Schedule schedule();
/// Makes operations of a lane that are issued from now on take no less time than their bytes at this rate. 0: no bound.
void set_pace(const std::string &lane, double bytes_per_s);

enum Thread { MAIN, AUTOGRAD, OTHER, NUM_THREADS };
Thread this_thread();
const char *thread_name(Thread thread);

/// Operations that are issued and not done.
uint64_t num_pending();
/// Host waits since the last reset, by the thread that waited.
std::array<uint64_t, NUM_THREADS> num_host_waits();
void reset_host_waits();

} // namespace sim
