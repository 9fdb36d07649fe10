//! What happens when: a heap of numbered entries whose times may change.

/// Where an entry is that is not in the heap.
const ABSENT: u32 = u32::MAX;
/// Children of a node: a flat heap has fewer levels, which are what costs.
const CHILDREN: usize = 4;

/// At most one time for each number below a bound; the earliest comes first, of equal times the
/// smallest number. So an order of events depends on nothing else.
#[derive(Debug)]
pub(super) struct Agenda {
    heap: Vec<(u64, u32)>,
    /// Where each number is in the heap.
    places: Vec<u32>,
}

impl Agenda {
    /// An agenda of the numbers below `numbers`.
    pub(super) fn new(numbers: usize) -> Self {
        Self { heap: Vec::new(), places: vec![ABSENT; numbers] }
    }

    /// The time of the earliest entry.
    pub(super) fn next_time(&self) -> Option<u64> {
        self.heap.first().map(|&(time, _)| time)
    }

    /// Takes the earliest entry.
    pub(super) fn pop(&mut self) -> Option<(u64, u32)> {
        let &first = self.heap.first()?;
        let last = self.heap.pop()?;
        self.places[first.1 as usize] = ABSENT;
        if first != last {
            self.settle(0, last);
        }
        Some(first)
    }

    /// Enters `number` at `time`, or moves it there.
    pub(super) fn schedule(&mut self, number: u32, time: u64) {
        let place = match self.places[number as usize] {
            ABSENT => {
                self.heap.push((time, number));
                self.heap.len() - 1
            }
            place => place as usize,
        };
        self.settle(place, (time, number));
    }

    /// Puts `entry` at `hole` or where it belongs from there.
    fn settle(&mut self, mut hole: usize, entry: (u64, u32)) {
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

    fn set(&mut self, place: usize, entry: (u64, u32)) {
        self.heap[place] = entry;
        self.places[entry.1 as usize] = u32::try_from(place).expect("fewer entries than numbers");
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
            let mut agenda = Agenda::new(40);
            let mut wanted = BTreeMap::new();
            for _ in 0..rng.usize(1..300) {
                if rng.u32(..4) == 0 {
                    let next = wanted.iter().map(|(&number, &time)| (time, number)).min();
                    assert_eq!(agenda.next_time(), next.map(|(time, _)| time), "seed {seed}");
                    assert_eq!(agenda.pop(), next, "seed {seed}");
                    next.and_then(|(_, number)| wanted.remove(&number));
                } else {
                    let (number, time) = (rng.u32(..40), rng.u64(..20));
                    agenda.schedule(number, time);
                    wanted.insert(number, time);
                }
            }
        }
    }
}
