//! Bytes under way, and what they share.
//!
//! A flow gets, of everything that it uses, an equal share, and moves at the smallest of these. What
//! a flow held up elsewhere leaves of its share is not given to the others: rates are at most those
//! of max–min fairness, so times err on the long side, and where all flows of a resource are held up
//! alike, as in symmetric plans, they are the same. In return, a flow that begins or ends changes
//! the rates of its neighbours only, not of their neighbours.
//!
//! Rates are `f64`. Only sums, products, quotients and roundings are taken, which IEEE 754 defines
//! to the bit.

use super::agenda::Agenda;

/// The most resources that one flow uses.
const USES_MAX: usize = 8;

/// What a flow uses, and what all flows there may move together, in bytes a picosecond.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Use {
    pub(super) resource: u32,
    pub(super) rate: f64,
}

/// The resources of one flow.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Uses {
    uses: [Use; USES_MAX],
    count: u8,
}

/// Bytes under way.
#[derive(Clone, Copy, Debug, Default)]
struct Flow {
    uses: Uses,
    /// Of the flow alone.
    rate_max: f64,
    /// Bytes not yet moved at `since`.
    remaining: f64,
    rate: f64,
    since: u64,
    /// The last settlement that looked at it.
    seen: u64,
}

#[derive(Clone, Debug, Default)]
struct Resource {
    flows: Vec<u32>,
    most: u32,
    changed: bool,
}

/// All flows, by number.
#[derive(Debug)]
pub(super) struct Flows {
    flows: Vec<Flow>,
    resources: Vec<Resource>,
    changed: Vec<u32>,
    settlements: u64,
}

impl Uses {
    pub(super) fn push(&mut self, resource: u32, bytes_per_second: f64) {
        self.uses[usize::from(self.count)] =
            Use { resource, rate: per_picosecond(bytes_per_second) };
        self.count += 1;
    }

    fn all(&self) -> &[Use] {
        &self.uses[..usize::from(self.count)]
    }
}

impl Flows {
    pub(super) fn new(flows: usize, resources: usize) -> Self {
        Self {
            flows: vec![Flow::default(); flows],
            resources: vec![Resource::default(); resources],
            changed: Vec::new(),
            settlements: 0,
        }
    }

    /// Begins flow `number` of `bytes`; its end is on the agenda after the next settlement.
    pub(super) fn begin(
        &mut self,
        number: u32,
        now: u64,
        bytes: u64,
        bytes_per_second: f64,
        uses: Uses,
    ) {
        self.flows[number as usize] = Flow {
            uses,
            rate_max: per_picosecond(bytes_per_second),
            remaining: bytes as f64,
            rate: 0.0,
            since: now,
            seen: 0,
        };
        for &Use { resource, .. } in uses.all() {
            self.resources[resource as usize].flows.push(number);
            self.change(resource);
        }
    }

    /// Ends flow `number`.
    pub(super) fn end(&mut self, number: u32) {
        let uses = self.flows[number as usize].uses;
        for &Use { resource, .. } in uses.all() {
            let flows = &mut self.resources[resource as usize].flows;
            let place = flows.iter().position(|&flow| flow == number).expect("the flow is there");
            flows.swap_remove(place);
            self.change(resource);
        }
    }

    /// Once everything that happens at `now` has happened: gives the flows whose share has changed
    /// new rates, and enters their ends on the agenda, each as the number that `entry` has for it.
    pub(super) fn settle(&mut self, now: u64, agenda: &mut Agenda, entry: impl Fn(u32) -> u32) {
        self.settlements += 1;
        while let Some(resource) = self.changed.pop() {
            let Resource { flows, most, changed } = &mut self.resources[resource as usize];
            *changed = false;
            *most = (*most).max(flows.len() as u32);
            for index in 0..flows.len() {
                let number = self.resources[resource as usize].flows[index];
                if let Some(end) = self.settle_flow(number, now) {
                    agenda.schedule(entry(number), end);
                }
            }
        }
    }

    /// When the flow ends, if that has changed.
    fn settle_flow(&mut self, number: u32, now: u64) -> Option<u64> {
        let flow = &mut self.flows[number as usize];
        if flow.seen == self.settlements {
            return None;
        }
        flow.seen = self.settlements;
        let share = |&Use { resource, rate }: &Use| {
            rate / self.resources[resource as usize].flows.len() as f64
        };
        let rate = flow.uses.all().iter().map(share).fold(flow.rate_max, f64::min);
        if rate == flow.rate {
            return None;
        }
        let moved = flow.rate * (now - flow.since) as f64;
        flow.remaining = (flow.remaining - moved).max(0.0);
        flow.rate = rate;
        flow.since = now;
        // A cast from a float saturates.
        Some(now.saturating_add((flow.remaining / rate).ceil() as u64))
    }

    fn change(&mut self, resource: u32) {
        let changed = &mut self.resources[resource as usize].changed;
        if !std::mem::replace(changed, true) {
            self.changed.push(resource);
        }
    }

    /// The most flows that a resource had at once.
    pub(super) fn most(&self, resource: u32) -> u32 {
        self.resources[resource as usize].most
    }
}

fn per_picosecond(bytes_per_second: f64) -> f64 {
    bytes_per_second / 1e12
}
