// pace: the bytes of strips that a step program has under way, those of them that are in flight, and the strips of a
// tile that it moves at once.
//
//     few, small    stay in a processor's cache, with which some disks exchange bytes faster than with memory
//     many, large   keep a disk busy that is the faster the more it has to do, or that takes its time for each transfer
//
// A third of what is under way waits in queues, so that a disk which ends all that it has at once goes on without the
// program. Which of them a machine wants shows only when it is tried. A program tries three settings in trials of equal
// bytes, one after the other, keeps the lowest that is about as fast as any, and tries again later: each time after
// twice as many trials, because disks that others use drift. Tiles whose states begin are left out: they are not read,
// so they tell nothing of later steps.
#ifndef TIERMEM_PACE_H
#define TIERMEM_PACE_H

#include <stdint.h>

class tm_pace {
  public:
    // least: the lowest limit in bytes, which is the first one.
    explicit tm_pace(uint64_t least);

    // Bytes that may be under way.
    uint64_t limit() const { return limits[now]; }

    // Bytes that are in flight of these.
    uint64_t most_flying() const { return limit() / 3 * 2; }

    // Strips of one tile that are moved, checked and stepped together.
    uint32_t strips_at_once() const { return 1u << now; }

    // Bytes have been moved while more wait for room.
    void moved(uint64_t more_bytes, int64_t now_ns);

    // The time until `moved` tells nothing of the disk: nothing waits for room, or states begin.
    void pause() { last_ns = 0; }

    // Bytes of a trial, and those before them that the setting of the trial before has let in.
    uint64_t trial_bytes() const { return 3 * fill_bytes(); }
    uint64_t fill_bytes() const { return limits[NUM_SETTINGS - 1]; }

  private:
    enum { NUM_SETTINGS = 3, FEW_TRIES = 3, NUM_TRIES = 8, FIRST_KEPT = 64, MOST_KEPT = 1024 };

    void end_trial();
    void begin_trying();
    void try_next();
    bool is_ever_faster(int setting) const;
    int fastest();

    uint64_t limits[NUM_SETTINGS];
    int now = 0;
    int64_t times_ns[NUM_SETTINGS][NUM_TRIES];
    bool is_tried[NUM_SETTINGS] = {true, true, true};
    int num_tries = 0;         // of each setting that is tried
    int num_trials = 0;        // with the setting that is kept
    int num_kept = FIRST_KEPT; // trials, until settings are tried again
    bool is_trying = true;
    uint64_t bytes = 0; // of this trial
    int64_t trial_ns = 0;
    int64_t last_ns = 0; // 0: paused
};

#endif
