//! What has to happen before a lane can come further.

use super::{Lane, holds};
use crate::plan::Tier;
use crate::run::bed::Needs;
use crate::run::port::Bound;
use crate::run::turns::Start;
use crate::window::FlagSpot;

impl Lane {
    /// What has to happen before a look can get the starts up to `started` further.
    pub(crate) fn needs(&mut self, started: u64) -> Needs {
        let mut needs = Needs::default();
        if self.done >= started {
            return needs;
        }
        match self.queues_waits() {
            true => self.need_queued(started, &mut needs),
            false => self.need_driven(started, &mut needs),
        }
        needs
    }

    /// For an engine to which the lane hands what is behind a wait once its flag is there.
    fn need_driven(&self, started: u64, needs: &mut Needs) {
        let next = self.program.steps.get(self.next);
        match next.filter(|_| !self.is_submitted(started)) {
            Some(&Bound::Wait { flag }) if self.has_reached(flag, self.epoch) => needs.ready = true,
            Some(&Bound::Wait { flag }) => {
                needs.engine = self.looked < self.last;
                needs.flags.add(self.writer(flag));
            }
            // All is submitted, or the queue is full.
            _ => needs.engine = true,
        }
    }

    /// For an engine that has the waits in its queue.
    fn need_queued(&mut self, started: u64, needs: &mut Needs) {
        let oldest = self.done + 1;
        let mut waits =
            self.program.steps.iter().enumerate().filter_map(|(at, step)| match *step {
                Bound::Wait { flag } => Some((at, flag)),
                _ => None,
            });
        let next = waits.find(|&(_, flag)| !self.has_reached(flag, oldest));
        if !self.is_submitted(started) {
            // Of room in a queue that was full nobody tells.
            needs.engine = true;
            Tier::ALL.iter().for_each(|&tier| needs.flags.add(tier));
        } else if !self.port.is_blocked() {
            // Flags that it asks for later have to come meanwhile.
            let asked = next.into_iter().chain(waits);
            asked.for_each(|(_, flag)| needs.flags.add(self.writer(flag)));
            needs.engine = true;
        } else {
            // Where a flag has come since the engine looked, it stands at an earlier wait.
            let stands = (oldest, next.map(|(at, _)| at));
            match next.filter(|_| self.stands == stands) {
                Some((_, flag)) => needs.flags.add(self.writer(flag)),
                None => needs.ready = true,
            }
            self.stands = stands;
        }
    }

    /// Whether a flag is known to be there.
    fn has_reached(&self, flag: FlagSpot, epoch: u64) -> bool {
        let start = Start::Eager(epoch);
        let flag = self.port.flag(flag, start);
        flag.is_some_and(|flag| holds(flag, start))
    }

    /// The tier of the lane that writes a flag of this lane.
    fn writer(&self, flag: FlagSpot) -> Tier {
        match (self.tier, flag.crossing) {
            (tier, false) => tier,
            (Tier::Local, true) => Tier::Network,
            (Tier::Network, true) => Tier::Local,
        }
    }
}
