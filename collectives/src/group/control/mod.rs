//! Implements the protocol by which all ranks agree that a group has ended, and which rank is to blame.
//!
//! The state is driven by events with the time at which they occur, and does no I/O. The group's threads and
//! the simulation of the control plane drive the same.
//!
//! A rank whose deadline passes does not blame the rank that it waits for, because that rank may wait too. It sends
//! an *inquiry*. Every rank answers with the ranks that it waits for. When all have answered, or after [a
//! limit](Control::inquiry_timeout), [`blame`] follows these waits from the rank that asked to a rank that does not
//! answer or does not wait. A rank whose copies need others to take part is held up by those of them that do not
//! answer. Before a rank that answers is blamed, the inquiry is repeated once, because that rank may have gone on a
//! moment ago. The bootstrap delivers messages to all ranks in one order, so all ranks know the same answers, and
//! the first abort record that it delivers counts.
//!
//! If the rank that relays the messages stops, no rank receives its own inquiry. Every rank then blames that
//! rank, with the same record.
//!
//! On busy processors, a rank or the relay can take longer to answer than any limit. So a rank whose process is
//! [seen](Sight) to run is given more time, and one whose process is stopped at two looks is blamed. Every answer tells
//! what its rank sees, for ranks on other hosts. The limits decide only if nobody sees the process.

#[cfg(test)]
mod simulation;

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use peerlane_hal::{Rank, SharedQueues};
use serde::{Deserialize, Serialize};

use crate::bootstrap::abort::{AbortRecord, Cause};
use crate::bootstrap::client::RUNNING_ANSWER_TIMEOUT;
use crate::bootstrap::{Notice, ProcessState};
use crate::group::call;

const INQUIRY_TIMEOUT_MIN: Duration = Duration::from_millis(250);
const INQUIRY_TIMEOUT_MAX: Duration = Duration::from_secs(2);
const INQUIRY_PART: u32 = 20;
/// An exchange between all ranks takes longer where processors are busy, so the time to answer is a multiple of its
/// measured time.
const INQUIRY_EXCHANGES: u32 = 5;
/// The most ranks whose calls the text of a record contains.
const NAMED_RANKS_MAX: usize = 16;
const CONFIRM_PAUSE: Duration = Duration::from_millis(50);
/// The pause between two looks at the process of a relay that has not answered.
const SIGHT_PAUSE: Duration = Duration::from_millis(100);
pub(super) const ACKNOWLEDGE_TIMEOUT: Duration = Duration::from_millis(1500);
const ACKNOWLEDGE_ANSWERED_TIMEOUT: Duration = Duration::from_millis(100);

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
enum Message {
    Inquiry { state: RankState, record: AbortRecord, confirms: bool, limit: Duration },
    Answer(Answer),
    Order(call::Message),
}

/// Encodes a message about the order of calls.
pub(super) fn encode_order(message: call::Message) -> Vec<u8> {
    postcard::to_stdvec(&Message::Order(message)).expect("plain data always encodes")
}

/// What a rank tells the others when one of them asks.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct RankState {
    /// The ranks that this rank waits for; empty if it does not wait.
    pub(super) waits: Vec<u32>,
    /// Whether this rank waits for no rank, but for copies that complete only while all ranks take part.
    pub(super) copies_with_others: bool,
    /// This rank's newest start of the operation that the inquiry is about, if starts can have lengths and places of their own.
    pub(super) start: Option<SizedStart>,
    /// The call that this rank is in, or the last one if it has refused it, as the words after "rank 1".
    pub(super) call: Option<String>,
    /// The ranks whose processes this rank sees, and whether they are stopped.
    pub(super) seen: Vec<(u32, bool)>,
}

/// What this rank sees of the processes of others.
pub(super) trait Sight {
    /// Returns what this rank sees of the process of a rank.
    fn process(&self, rank: Rank) -> ProcessState;

    /// Returns what this rank sees of the process that relays messages.
    fn relay(&self) -> ProcessState;
}

/// The number of a start, and its lengths and places in words.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(super) struct SizedStart {
    pub(super) epoch: u64,
    pub(super) part: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Answer {
    state: RankState,
    adopted: Option<AbortRecord>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Action {
    Broadcast(Vec<u8>),
    Abort(AbortRecord),
    /// Compares the calls of another rank with those of this one.
    Order {
        from: Rank,
        message: call::Message,
    },
}

#[derive(Debug)]
pub(super) struct Control {
    rank: Rank,
    left: Vec<bool>,
    relay: Option<Rank>,
    record: Option<AbortRecord>,
    /// The time limit for acknowledgments of the abort record; `None` once all other ranks have sent theirs.
    acknowledge_by: Option<Instant>,
    inquiry: Option<Inquiry>,
    pending: Option<Pending>,
    conclusion: Option<Conclusion>,
    queues: Option<SharedQueues>,
    timeout: Duration,
    exchange: Option<Duration>,
}

#[derive(Debug)]
struct Conclusion {
    blamed: Option<u32>,
    /// The time at which this rank sends its second inquiry; `None` once it has.
    confirm_at: Option<Instant>,
}

#[derive(Debug)]
struct Inquiry {
    from: Rank,
    record: AbortRecord,
    confirms: bool,
    answers: BTreeMap<Rank, Answer>,
    begun: Instant,
    until: Instant,
    limit: Duration,
}

#[derive(Debug)]
struct Pending {
    begun: Instant,
    /// The time of the next look at the process of the relay.
    look_at: Instant,
    /// Whether the relay was stopped at the last look. A debugger stops a process for a moment, so one look is not enough.
    was_stopped: bool,
    record: Option<AbortRecord>,
}

impl Pending {
    fn new(now: Instant, record: Option<AbortRecord>) -> Self {
        Self { begun: now, look_at: now + SIGHT_PAUSE, was_stopped: false, record }
    }
}

impl Control {
    pub(super) fn new(rank: Rank, ranks: usize, relay: Option<Rank>) -> Self {
        Self {
            rank,
            left: vec![false; ranks],
            relay,
            record: None,
            acknowledge_by: None,
            inquiry: None,
            pending: None,
            conclusion: None,
            queues: None,
            timeout: Duration::ZERO,
            exchange: None,
        }
    }

    pub(super) fn set_timeout(&mut self, timeout: Duration) {
        self.timeout = timeout;
    }

    pub(super) fn add_exchange(&mut self, took: Duration) {
        self.exchange = Some(self.exchange.map_or(took, |shortest| shortest.min(took)));
    }

    fn inquiry_timeout(&self) -> Duration {
        let exchanges = self.exchange.unwrap_or_default().saturating_mul(INQUIRY_EXCHANGES);
        let limit = exchanges.max(self.timeout / INQUIRY_PART);
        limit.clamp(INQUIRY_TIMEOUT_MIN, INQUIRY_TIMEOUT_MAX)
    }

    pub(super) fn add_queues(&mut self, queues: Option<SharedQueues>) {
        self.queues = self.queues.or(queues);
    }

    pub(super) fn record(&self) -> Option<&AbortRecord> {
        self.record.as_ref()
    }

    pub(super) fn is_acknowledged(&self) -> bool {
        self.record.is_some() && self.acknowledge_by.is_none()
    }

    pub(super) fn has_left(&self, rank: Rank) -> bool {
        self.left.get(rank.index()).is_some_and(|left| *left)
    }

    #[must_use]
    pub(super) fn overdue(
        &mut self,
        now: Instant,
        state: RankState,
        record: AbortRecord,
    ) -> Option<Action> {
        if self.record.is_some() || self.inquiry.is_some() || self.pending.is_some() {
            return None;
        }
        self.pending = Some(Pending::new(now, None));
        let limit = self.inquiry_timeout();
        Some(Message::Inquiry { state, record, confirms: false, limit }.broadcast())
    }

    #[must_use]
    pub(super) fn abort(&mut self, now: Instant, record: AbortRecord) -> Option<Action> {
        let is_pending = self.pending.as_ref().is_some_and(|pending| pending.record.is_some());
        if self.record.is_some() || is_pending {
            return None;
        }
        self.pending = Some(Pending::new(now, Some(record.clone())));
        Some(Action::Abort(record))
    }

    pub(super) fn adopt(&mut self, now: Instant, record: AbortRecord) {
        self.end(now, record);
        self.acknowledge_by = None;
    }

    #[must_use]
    pub(super) fn receive(
        &mut self,
        now: Instant,
        notice: Notice,
        state: impl Fn(&AbortRecord) -> RankState,
        sight: &dyn Sight,
    ) -> Option<Action> {
        match notice {
            Notice::Abort { from, record } => self.end(now, AbortRecord::decode(&record, from)),
            Notice::Lost { rank, how } => self.end(now, AbortRecord::lost(rank, &how)),
            Notice::Acknowledged => self.acknowledge_by = None,
            Notice::Left { rank } => {
                if let Some(left) = self.left.get_mut(rank.index()) {
                    *left = true;
                }
            }
            Notice::Message { from, message } => {
                // Bytes of another program version are ignored; the sender's timeout ends the group.
                return match postcard::from_bytes(&message).ok()? {
                    Message::Order(message) => Some(Action::Order { from, message }),
                    message => self.receive_message(now, from, message, state, sight),
                };
            }
        }
        None
    }

    /// The bootstrap's time limit for delivering a message is longer than an inquiry, so that a rank which decides has
    /// heard all answers.
    pub(super) fn relay_timeout(&self) -> Duration {
        let limit = self.inquiry_timeout() * 7 / 5;
        // A relay in this process does not stop alone.
        if self.relay == Some(self.rank) { ACKNOWLEDGE_TIMEOUT.max(limit) } else { limit }
    }

    fn receive_message(
        &mut self,
        now: Instant,
        from: Rank,
        message: Message,
        state: impl Fn(&AbortRecord) -> RankState,
        sight: &dyn Sight,
    ) -> Option<Action> {
        if from == self.rank && self.pending.as_ref().is_some_and(|sent| sent.record.is_none()) {
            self.pending = None;
        }
        let answer = match message {
            Message::Inquiry { state: asked, record, confirms, limit } => {
                if confirms && self.inquiry.as_ref().is_some_and(|first| first.from == from) {
                    self.inquiry = None;
                }
                let asked = if confirms && from == self.rank { state(&record) } else { asked };
                let answer = Answer { state: asked, adopted: None };
                let Some(inquiry) = &mut self.inquiry else {
                    // A peer's number must not overflow the time.
                    let limit = limit.min(INQUIRY_TIMEOUT_MAX);
                    let (answers, until) = (BTreeMap::from([(from, answer)]), now + limit);
                    let own = state(&record);
                    let begun = now;
                    self.inquiry =
                        Some(Inquiry { from, record, confirms, answers, begun, until, limit });
                    if from == self.rank {
                        return self.decide_if_complete(now, sight);
                    }
                    let answer = Answer { state: own, adopted: self.record.clone() };
                    return Some(Message::Answer(answer).broadcast());
                };
                // The deadline of another rank passed too, so its inquiry answers the first one.
                inquiry.answers.entry(from).or_insert(answer);
                return self.decide_if_complete(now, sight);
            }
            Message::Answer(answer) => answer,
            // `receive` passes it on.
            Message::Order(_) => return None,
        };
        self.inquiry.as_mut()?.answers.entry(from).or_insert(answer);
        self.decide_if_complete(now, sight)
    }

    #[must_use]
    pub(super) fn tick(&mut self, now: Instant, sight: &dyn Sight) -> Option<Action> {
        if self.acknowledge_by.is_some_and(|by| by <= now) {
            self.acknowledge_by = None;
        }
        if self.record.is_some() {
            return None;
        }

        if let Some(record) = self.look_at_relay(now, sight) {
            self.adopt(now, record.clone());
            return Some(Action::Abort(record));
        }

        if self.decide_at().is_none_or(|at| at > now) {
            return None;
        }
        if let Some(conclusion) = &mut self.conclusion
            && conclusion.confirm_at.take().is_some()
        {
            let record = self.inquiry.as_ref()?.record.clone();
            self.pending = Some(Pending::new(now, None));
            let (state, limit) = (RankState::default(), self.inquiry_timeout());
            return Some(Message::Inquiry { state, record, confirms: true, limit }.broadcast());
        }
        self.decide(now, sight)
    }

    /// Returns the record that blames the relay if this rank has not received its own message, and the relay has had its time.
    fn look_at_relay(&mut self, now: Instant, sight: &dyn Sight) -> Option<AbortRecord> {
        let relay_timeout = self.relay_timeout();
        let sent = self.pending.as_mut().filter(|sent| sent.look_at <= now)?;
        let process = sight.relay();
        let until = match process {
            ProcessState::Stopped if std::mem::replace(&mut sent.was_stopped, true) => now,
            ProcessState::Stopped => now + SIGHT_PAUSE,
            ProcessState::Unknown => sent.begun + relay_timeout,
            // The end of the relay is reported by its connection.
            ProcessState::Running | ProcessState::Ended => sent.begun + RUNNING_ANSWER_TIMEOUT,
        };
        if now >= until {
            return Some(self.relay_record(process));
        }
        sent.was_stopped &= process == ProcessState::Stopped;
        sent.look_at = if process == ProcessState::Unknown { until } else { now + SIGHT_PAUSE };
        None
    }

    pub(super) fn next_tick(&self) -> Option<Instant> {
        if self.record.is_some() {
            return self.acknowledge_by;
        }
        let sent = self.pending.as_ref().map(|sent| sent.look_at);
        sent.into_iter().chain(self.decide_at()).min()
    }

    /// Returns the time until [`tick`](Self::tick) has something to do.
    pub(super) fn until_tick(&self, now: Instant) -> Option<Duration> {
        self.next_tick().map(|at| at.saturating_duration_since(now))
    }

    /// The rank that started an inquiry decides its outcome first. Other ranks decide later, in case that rank has
    /// stopped since.
    fn decide_at(&self) -> Option<Instant> {
        let inquiry = self.inquiry.as_ref()?;
        let has_decided = self.pending.as_ref().is_some_and(|sent| sent.record.is_some());
        if let Some(Conclusion { confirm_at, .. }) = self.conclusion
            && confirm_at.is_some()
        {
            return confirm_at;
        }
        let backup = if inquiry.from == self.rank { Duration::ZERO } else { inquiry.limit / 2 };
        (!has_decided).then(|| inquiry.until + backup)
    }

    fn decide_if_complete(&mut self, now: Instant, sight: &dyn Sight) -> Option<Action> {
        let inquiry = self.inquiry.as_ref().filter(|inquiry| inquiry.from == self.rank)?;
        // The second inquiry follows the conclusion of the first one.
        if inquiry.confirms != self.conclusion.is_some() {
            return None;
        }
        let is_silent = |rank: &Rank| !inquiry.answers.contains_key(rank) && !self.has_left(*rank);
        let mut silent = Rank::all(self.left.len()).filter(is_silent).peekable();
        if silent.peek().is_none() {
            return self.decide(now, sight);
        }
        if silent.any(|rank| inquiry.process(rank, sight) != ProcessState::Stopped) {
            return None;
        }

        // The rest is stopped. A debugger stops a process for a moment, so the decision looks again.
        if let Some(inquiry) = &mut self.inquiry {
            inquiry.until = inquiry.until.min(now + SIGHT_PAUSE);
        }
        None
    }

    fn decide(&mut self, now: Instant, sight: &dyn Sight) -> Option<Action> {
        let inquiry = self.inquiry.as_mut()?;
        let has_time = now < inquiry.begun + RUNNING_ANSWER_TIMEOUT;
        let verdict = blame(inquiry, &self.left, self.queues, sight, has_time);
        let Some((mut record, blamed)) = verdict else {
            inquiry.until = now + inquiry.limit;
            return None;
        };
        if inquiry.from == self.rank && blamed.is_some() && !record.unanswered {
            match &self.conclusion {
                // A rank that answers may have gone on a moment ago, and what it sent may be on its way.
                None if now < inquiry.until => {
                    let confirm_at = Some(now + CONFIRM_PAUSE);
                    self.conclusion = Some(Conclusion { blamed, confirm_at });
                    return None;
                }
                Some(conclusion) if conclusion.blamed != blamed => {
                    record = inquiry.record.clone();
                    record.peer = None;
                    record.text.push_str("; the ranks have gone on since");
                }
                _ => {}
            }
        }
        self.abort(now, record)
    }

    fn end(&mut self, now: Instant, record: AbortRecord) {
        if self.record.is_some() {
            return;
        }
        // After an inquiry, all ranks but one have just answered.
        let timeout =
            if record.unanswered { ACKNOWLEDGE_ANSWERED_TIMEOUT } else { ACKNOWLEDGE_TIMEOUT };
        self.acknowledge_by = Some(now + timeout);
        self.record = Some(record);
        self.pending = None;
    }

    fn relay_record(&self, process: ProcessState) -> AbortRecord {
        let relay = self.relay.map_or_else(|| "the hub".to_owned(), |rank| format!("rank {rank}"));
        let text = if process == ProcessState::Running {
            let seconds = RUNNING_ANSWER_TIMEOUT.as_secs();
            format!(
                "{relay} is alive but late: it relays the messages of the group, and did not for {seconds} s"
            )
        } else {
            format!("{relay} did not answer after a timeout; it relays the messages of the group")
        };
        AbortRecord { unanswered: true, ..AbortRecord::timeout(self.relay, text) }
    }
}

impl Inquiry {
    /// Returns what this rank sees of the process of a rank, or else what another rank has seen that has answered.
    fn process(&self, rank: Rank, sight: &dyn Sight) -> ProcessState {
        let own = sight.process(rank);
        if own != ProcessState::Unknown {
            return own;
        }
        let seen = self.answers.values().flat_map(|answer| &answer.state.seen);
        match seen.into_iter().find(|(other, _)| *other == rank.0) {
            Some((_, true)) => ProcessState::Stopped,
            Some((_, false)) => ProcessState::Running,
            None => ProcessState::Unknown,
        }
    }
}

impl Message {
    fn broadcast(&self) -> Action {
        Action::Broadcast(postcard::to_stdvec(self).expect("plain data always encodes"))
    }
}

/// Returns the record of a mismatch if the rank that asked has found one, or two ranks answer that they made the same start with
/// different lengths or places. Neither of the two is to blame more than the other.
fn different_starts(inquiry: &Inquiry) -> Option<AbortRecord> {
    let mut record = inquiry.record.clone();
    let start_of = |rank: Rank| inquiry.answers.get(&rank)?.state.start.as_ref();
    if record.cause == Cause::Mismatch {
        if let Some(other) = record.peer.take() {
            let part = start_of(other).map_or("other values", |start| start.part.as_str());
            record.text.push_str(&format!(", rank {other} with {part}"));
        }
        return Some(record);
    }

    let starts = || inquiry.answers.keys().filter_map(|rank| Some((rank, start_of(*rank)?)));
    let (one, other) = starts().find_map(|one| {
        let differs = |other: &(&Rank, &SizedStart)| {
            other.1.epoch == one.1.epoch && other.1.part != one.1.part
        };
        starts().find(differs).map(|other| (one, other))
    })?;

    record.text.push_str(&format!(
        "; ranks disagree: rank {} made start {} with {}, rank {} with {}",
        one.0, one.1.epoch, one.1.part, other.0, other.1.part
    ));
    (record.cause, record.peer) = (Cause::Mismatch, None);
    Some(record)
}

/// Finds the rank to blame for a timeout, by following from rank to rank who waits for whom.
///
/// If the rank that asked does not wait for another rank, it is that rank, and its record stays unchanged. `None` means that a
/// rank that runs has not answered yet, and `has_time`.
fn blame(
    inquiry: &Inquiry,
    left: &[bool],
    queues: Option<SharedQueues>,
    sight: &dyn Sight,
    has_time: bool,
) -> Option<(AbortRecord, Option<u32>)> {
    if let Some(adopted) = inquiry.answers.values().find_map(|answer| answer.adopted.clone()) {
        return Some((adopted, None));
    }
    if let Some(record) = different_starts(inquiry) {
        return Some((record, None));
    }

    // The ranks that the rank that asked waits for, directly or through others, with the rank before each.
    let mut reached = vec![inquiry.from.0];
    let mut before: BTreeMap<u32, u32> = BTreeMap::new();
    let mut next = 0;
    while let Some(&rank) = reached.get(next) {
        next += 1;
        let Some(answer) = inquiry.answers.get(&Rank(rank)) else { continue };
        // A rank that has left took part in all that the others wait for.
        let is_live = |other: &u32| left.get(*other as usize) == Some(&false);
        // Copies can be late for reasons that no other rank has. So a rank that has to take part in them counts only if it
        // does not answer.
        let is_silent = |other: &u32| !inquiry.answers.contains_key(&Rank(*other));
        let copies = answer.state.copies_with_others.then_some(0..left.len() as u32);
        let copies = copies.into_iter().flatten().filter(is_silent);
        for other in answer.state.waits.iter().copied().chain(copies).filter(is_live) {
            if other != inquiry.from.0 && !before.contains_key(&other) {
                before.insert(other, rank);
                reached.push(other);
            }
        }
    }

    let answer = |rank: &u32| inquiry.answers.get(&Rank(*rank));
    let silent: Vec<u32> = reached.iter().copied().filter(|rank| answer(rank).is_none()).collect();
    let process = |rank: &u32| inquiry.process(Rank(*rank), sight);
    let is_stopped = |rank: &&u32| process(rank) == ProcessState::Stopped;
    let is_unseen = |rank: &&u32| process(rank) == ProcessState::Unknown;
    let stopped = silent.iter().find(is_stopped);
    let known = stopped.or_else(|| silent.iter().find(is_unseen));
    if known.is_none() && !silent.is_empty() && has_time {
        return None;
    }
    let silent = known.or(silent.first());
    let idle = || {
        reached.iter().find(|rank| answer(rank).is_some_and(|answer| answer.state.waits.is_empty()))
    };
    let mut record = inquiry.record.clone();
    let Some(&blamed) = silent.or_else(idle) else {
        // A rank that had stopped has just gone on, or ranks make their calls in different orders.
        record.peer = None;
        record.text.push_str("; all ranks answer and wait for each other");
        for rank in reached.iter().take(NAMED_RANKS_MAX) {
            let call = answer(rank).and_then(|answer| answer.state.call.as_deref());
            call.into_iter()
                .for_each(|call| record.text.push_str(&format!("; rank {rank} {call}")));
        }
        if let Some(SharedQueues { count, variable }) = queues {
            record.text.push_str(&format!(
                "; if they start operations in different orders, each start that waits takes one of the {count} \
                 hardware queues that {variable} permits"
            ));
        }
        return Some((record, None));
    };
    if blamed == inquiry.from.0 {
        // It waits for its own copies, or for a hub outside of the group.
        return Some((record, Some(blamed)));
    }

    record.unanswered = silent.is_some();
    record.peer = Some(Rank(blamed));
    let mut chain = vec![blamed];
    while let Some(&rank) =
        before.get(&chain[chain.len() - 1]).filter(|rank| **rank != inquiry.from.0)
    {
        chain.push(rank);
    }
    for pair in chain.windows(2).rev() {
        record.text.push_str(&format!("; rank {} waits for rank {}", pair[1], pair[0]));
    }
    let end = match silent {
        None => "is alive but late",
        Some(_) if stopped.is_some() => "does not answer, because its process is stopped",
        Some(_) => "does not answer",
    };
    record.text.push_str(&format!("; rank {blamed} {end}"));
    if let Some(call) = answer(&blamed).and_then(|answer| answer.state.call.as_deref()) {
        record.text.push_str(&format!(", and {call}"));
    }
    Some((record, Some(blamed)))
}
