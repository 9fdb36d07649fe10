//! Orders simulated events by time, in a heap whose entries can be rescheduled.

/// The heap position of an event that is not scheduled.
const ABSENT: u32 = u32::MAX;

/// The maximum number of children of a heap node.
///
/// It is more than two because a flat heap has fewer levels to pass.
const CHILDREN: usize = 4;

/// Queues simulated events by time, with at most one entry for each event number.
///
/// The earliest event comes first, and the smallest number among equal times, so the order of
/// events depends on nothing else.
#[derive(Debug)]
pub(super) struct EventQueue {
    /// The time and number of each scheduled event, as a heap with the earliest event first.
    heap: Vec<(u64, u32)>,
    /// The position of each event number in the heap, or [`ABSENT`].
    positions: Vec<u32>,
}

impl EventQueue {
    /// Creates an empty queue for event numbers below `numbers`.
    pub(super) fn new(numbers: usize) -> Self {
        Self { heap: Vec::new(), positions: vec![ABSENT; numbers] }
    }

    pub(super) fn next_time(&self) -> Option<u64> {
        self.heap.first().map(|&(time, _)| time)
    }

    /// Removes the earliest event, and returns its time and number.
    pub(super) fn pop(&mut self) -> Option<(u64, u32)> {
        let &first = self.heap.first()?;
        let last = self.heap.pop()?;
        self.positions[first.1 as usize] = ABSENT;

        // If the first entry is also the last one, the heap is empty now.
        if first != last {
            self.sift(0, last);
        }
        Some(first)
    }

    /// Schedules the event `number` at `time`, or moves it to that time if it is already scheduled.
    pub(super) fn schedule(&mut self, number: u32, time: u64) {
        let position = match self.positions[number as usize] {
            ABSENT => {
                self.heap.push((time, number));
                self.heap.len() - 1
            }
            position => position as usize,
        };

        self.sift(position, (time, number));
    }

    /// Inserts `entry` into the heap at `hole`, and moves it up or down to its position.
    fn sift(&mut self, mut hole: usize, entry: (u64, u32)) {
        // An entry that moves up is earlier than all children there, so at most one of the loops
        // moves it.
        while hole > 0 {
            let parent = (hole - 1) / CHILDREN;
            if self.heap[parent] <= entry {
                break;
            }

            self.set(hole, self.heap[parent]);
            hole = parent;
        }

        loop {
            let first = hole * CHILDREN + 1;
            let children = first..(first + CHILDREN).min(self.heap.len());
            let Some(child) = children.min_by_key(|&child| self.heap[child]) else { break };
            if entry <= self.heap[child] {
                break;
            }

            self.set(hole, self.heap[child]);
            hole = child;
        }

        self.set(hole, entry);
    }

    fn set(&mut self, position: usize, entry: (u64, u32)) {
        self.heap[position] = entry;
        self.positions[entry.1 as usize] =
            u32::try_from(position).expect("fewer entries than numbers");
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    #[test]
    fn entries_come_in_order_of_time_and_number() {
        for seed in 0..200 {
            let mut rng = fastrand::Rng::with_seed(seed);
            let mut queue = EventQueue::new(40);
            let mut expected = BTreeMap::new();
            for _ in 0..rng.usize(1..300) {
                if rng.u32(..4) == 0 {
                    let next = expected.iter().map(|(&number, &time)| (time, number)).min();
                    assert_eq!(queue.next_time(), next.map(|(time, _)| time), "seed {seed}");
                    assert_eq!(queue.pop(), next, "seed {seed}");
                    next.and_then(|(_, number)| expected.remove(&number));
                } else {
                    let (number, time) = (rng.u32(..40), rng.u64(..20));
                    queue.schedule(number, time);
                    expected.insert(number, time);
                }
            }
        }
    }
}
