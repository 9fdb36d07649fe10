//! Sends the messages of a group and of its subgroups over the same connections.
//!
//! The group that was not split from another one is called the first group here. Each group has a
//! [`HubState`] in the hub and a [`Client`] on each of its ranks; messages say which group they
//! belong to. A rank that is lost is lost by all of its groups.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::mem;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use peerlane_hal::{Deadline, ErrorKind, Rank};
use serde::{Deserialize, Serialize};

use super::client::Client;
use super::hub::{Event, HubState, KEPT_BYTES};
use super::message::{Blob, EndCause, Reply, Request};
use super::meter::Charge;
use super::{Bootstrap, Listener, ProcessState};
use crate::error::Error;

/// Identifies a subgroup, which is a group that was split from another one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(crate) struct SubgroupId {
    /// The first rank of the subgroup, by its number in the group that was not split from another
    /// one.
    pub(crate) leader: u32,
    /// A number that the leader has chosen for this subgroup and for no other subgroup.
    pub(crate) number: u32,
}

/// Holds a message and the subgroup that it belongs to, or `None` for the group that was not split.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Addressed<M> {
    pub(crate) subgroup: Option<SubgroupId>,
    pub(crate) message: M,
}

impl<M> Addressed<M> {
    pub(crate) fn to_all(message: M) -> Self {
        Self { subgroup: None, message }
    }
}

/// The maximum number of bytes that one rank may make the hub store, before [`KEPT_BYTES_PER_RANK`]
/// is added for each rank.
///
/// A rank that makes the hub store more is lost.
const KEPT_BYTES_MAX: usize = 16 << 20;

/// The number of bytes that each rank of the job adds to [`KEPT_BYTES_MAX`], the limit on what one
/// rank may make the hub store.
///
/// The limit grows because groups and exchanges have a row for each rank.
const KEPT_BYTES_PER_RANK: usize = 1 << 10;

/// Stores the hub's states of a group and of all its subgroups.
pub(crate) struct HubGroups {
    first: HubState,
    /// The maximum number of bytes that one rank may make the hub store, for example in messages
    /// that other ranks have not read.
    kept_bytes_max: usize,
    subgroups: BTreeMap<SubgroupId, Subgroup>,
}

/// Stores the hub's state of one subgroup.
struct Subgroup {
    /// The ranks of the subgroup, by their numbers in the first group.
    ranks: Vec<Rank>,
    state: HubState,
    /// The rank that opened the subgroup first, which is charged for its memory.
    opened_by: Rank,
    /// The live ranks whose request to open the subgroup has not arrived.
    ///
    /// They do not know the subgroup yet.
    unopened: BTreeSet<Rank>,
    /// The replies so far, which a rank receives when it opens the subgroup.
    early: Vec<(Reply, Option<Arc<Charge>>)>,
    _charge: Charge,
}

impl Subgroup {
    /// Applies an event of `from`, a rank of the first group, and returns the replies.
    fn apply(&mut self, from: Rank, event: Event) -> Vec<Reply> {
        let own = self.ranks.iter().position(|rank| *rank == from);
        let replies = own.map_or_else(Vec::new, |own| self.state.apply(Rank::at(own), event));

        // Early replies are kept for ranks that open the group later, and a rank that is gone does
        // not.
        if own.is_some_and(|own| !self.state.is_live(Rank::at(own))) {
            self.unopened.remove(&from);
        }
        if self.unopened.is_empty() {
            self.early = Vec::new();
        }

        replies
    }

    /// Returns the live ranks of the subgroup, by their numbers in the first group.
    fn live(&self) -> impl Iterator<Item = Rank> {
        self.state.live().map(|rank| self.ranks[rank.index()])
    }

    /// Returns the ranks that have opened the subgroup and have not acknowledged its end.
    ///
    /// The result has their numbers in the first group.
    fn unacknowledged(&self) -> impl Iterator<Item = Rank> {
        let ranks = self.state.unacknowledged().map(|rank| self.ranks[rank.index()]);
        ranks.filter(|rank| !self.unopened.contains(rank))
    }
}

/// Holds a reply of the hub and the ranks that receive the reply.
#[derive(Debug)]
pub(crate) struct Outgoing {
    pub(crate) to: Vec<Rank>,
    pub(crate) reply: Addressed<Reply>,
    /// Charges the data of the reply to the rank that has sent it, until all ranks have received
    /// the reply.
    pub(crate) charge: Option<Arc<Charge>>,
}

impl HubGroups {
    pub(crate) fn new(ranks: usize) -> Self {
        let kept_bytes_max = KEPT_BYTES_MAX + ranks * KEPT_BYTES_PER_RANK;
        Self { first: HubState::new(ranks), kept_bytes_max, subgroups: BTreeMap::new() }
    }

    pub(crate) fn first(&self) -> &HubState {
        &self.first
    }

    pub(crate) fn refuse(&mut self, which: String) {
        self.first.refuse(which);
    }

    pub(crate) fn doubt_address(&mut self, how: String) {
        self.first.doubt_address(how);
    }

    /// Applies an event of the rank `from` to the group of the event, and returns the replies.
    ///
    /// A rank that leaves the first group or is lost has no part in the other groups either.
    pub(crate) fn apply(&mut self, from: Rank, event: Addressed<Event>) -> Vec<Outgoing> {
        let Addressed { subgroup, message: event } = event;
        let mut outgoing = match (subgroup, event) {
            (None, event) => self.apply_to_first(from, event),
            (Some(_), _) if !self.first.is_live(from) => Vec::new(),
            (Some(id), Event::Request(Request::Open { ranks })) => self.open(id, from, &ranks),
            (Some(id), event) => self.apply_to_subgroup(id, from, event),
        };

        // All groups share the meter of the rank, so more groups do not permit more bytes.
        let bytes = self.first.meter(from).bytes();
        if bytes > self.kept_bytes_max && self.first.is_live(from) {
            let how = format!(
                "the hub keeps {bytes} bytes of it that others have not taken, in messages, exchanges and groups, expected at \
                 most {}",
                self.kept_bytes_max
            );
            outgoing.extend(self.apply_to_first(from, Event::Lost { how }));
        }
        outgoing
    }

    /// Applies an event of `from` to the first group, and returns the replies.
    ///
    /// A rank that is then gone is removed from all its subgroups too.
    fn apply_to_first(&mut self, from: Rank, event: Event) -> Vec<Outgoing> {
        let was_live = self.first.is_live(from);
        let replies = self.first.apply(from, event);
        let mut outgoing = self.outgoing(None, from, replies);

        // A rank that is gone is gone in all of its groups.
        if was_live && !self.first.is_live(from) {
            let groups = self.subgroups.iter().filter(|(_, group)| group.ranks.contains(&from));
            let ids: Vec<_> = groups.map(|(id, _)| *id).collect();
            for id in ids {
                let event = self.end_in_subgroup(from);
                outgoing.extend(self.apply_to_subgroup(id, from, event));
            }
        }
        outgoing
    }

    /// Returns the event that removes `from` from its subgroups after it has gone from the first
    /// group.
    fn end_in_subgroup(&self, from: Rank) -> Event {
        match self.first.end_cause() {
            Some(EndCause::Lost { rank, how }) if *rank == from.0 => {
                Event::Lost { how: how.clone() }
            }
            // The group of a lost rank ends, so this rank has left.
            None => Event::Request(Request::Leave),
            // The group has ended before because of something else, and no longer tells how the
            // rank went.
            Some(_) => Event::Lost { how: "its connection closed".to_owned() },
        }
    }

    /// Opens a subgroup for the rank `from`, and returns the replies that the subgroup had before.
    ///
    /// All members have agreed on the group, so they count as joined before their own requests
    /// arrive.
    fn open(&mut self, id: SubgroupId, from: Rank, ranks: &[u32]) -> Vec<Outgoing> {
        if let Err(how) = self.check_members(id, from, ranks) {
            return self.apply_to_first(from, Event::Lost { how });
        }

        let ranks: Vec<Rank> = ranks.iter().map(|rank| Rank(*rank)).collect();
        let Some(group) = self.subgroups.get_mut(&id) else {
            return self.create(id, from, ranks);
        };

        if group.ranks != ranks {
            // The leader has chosen the number of its group, so its request is the right one.
            let wrong = if from.0 == id.leader { group.opened_by } else { from };
            let how = "it opened a group of other ranks than the rank that leads the group".into();
            return self.apply_to_first(wrong, Event::Lost { how });
        }

        if !group.unopened.remove(&from) {
            let how = "it opened a group twice".to_owned();
            return self.apply_to_first(from, Event::Lost { how });
        }

        let early = match group.unopened.is_empty() {
            true => mem::take(&mut group.early),
            false => group.early.clone(),
        };
        let mut outgoing = Vec::with_capacity(early.len());
        for (message, charge) in early {
            let reply = Addressed { subgroup: Some(id), message };
            outgoing.push(Outgoing { to: vec![from], reply, charge });
        }
        outgoing
    }

    /// Creates a subgroup that the rank `from` is the first to open, and returns the replies.
    fn create(&mut self, id: SubgroupId, from: Rank, ranks: Vec<Rank>) -> Vec<Outgoing> {
        // Each rank has a place in `ranks`, and at most one in `unopened`.
        let bytes = KEPT_BYTES + HubState::bytes(ranks.len()) + ranks.len() * 2 * size_of::<Rank>();
        let charge = self.first.meter(from).charge(bytes);

        let others = ranks.iter().copied().filter(|rank| *rank != from);
        let (unopened, gone): (BTreeSet<_>, BTreeSet<_>) =
            others.partition(|rank| self.first.is_live(*rank));

        let meters = ranks.iter().map(|rank| self.first.meter(*rank).clone()).collect();
        let group = Subgroup {
            ranks,
            state: HubState::of_subgroup(meters),
            opened_by: from,
            unopened,
            early: Vec::new(),
            _charge: charge,
        };
        self.subgroups.insert(id, group);

        // The ranks in `gone` went before the subgroup existed here, so it has not heard of their
        // end.
        let mut outgoing = Vec::new();
        for rank in gone {
            let how = "it was lost while the group was split".to_owned();
            outgoing.extend(self.apply_to_subgroup(id, rank, Event::Lost { how }));
        }
        outgoing
    }

    /// Checks `ranks`, the members of a subgroup that the rank `from` opens.
    ///
    /// The error continues a sentence about the rank.
    fn check_members(&self, id: SubgroupId, from: Rank, ranks: &[u32]) -> Result<(), String> {
        let different: BTreeSet<_> = ranks.iter().collect();
        let is_known = |rank: &u32| self.first.knows(Rank(*rank));

        let problem = if different.len() < ranks.len() {
            "a rank is in it twice"
        } else if !ranks.iter().all(is_known) {
            "a rank of it does not exist"
        } else if !ranks.contains(&from.0) {
            "the rank itself is not in it"
        } else if ranks.first() != Some(&id.leader) {
            "its first rank does not lead it"
        } else {
            return Ok(());
        };

        Err(format!("it opened a group of {} ranks, but {problem}", ranks.len()))
    }

    /// Applies an event of the rank `from` to a subgroup, and returns the replies.
    ///
    /// The subgroup is removed when it has no live rank any more.
    fn apply_to_subgroup(&mut self, id: SubgroupId, from: Rank, event: Event) -> Vec<Outgoing> {
        let event = match event {
            Event::Request(Request::GiveUp { how }) => Event::Lost { how },
            event => event,
        };
        let leaves = matches!(event, Event::Lost { .. } | Event::Request(Request::Leave));

        // A rank opens a group before it sends anything else to it, but can be gone before that.
        let group = self.subgroups.get_mut(&id);
        if !leaves && group.as_ref().is_some_and(|group| group.unopened.contains(&from)) {
            let how = "it sent a message of a group that it has not opened".to_owned();
            return self.apply_to_first(from, Event::Lost { how });
        }

        // A rank may send to a group that is gone until it hears of that.
        let replies = group.map_or_else(Vec::new, |group| group.apply(from, event));
        let mut outgoing = self.outgoing(Some(id), from, replies);
        if self.subgroups.get(&id).is_some_and(|group| group.live().next().is_none()) {
            self.subgroups.remove(&id);
        }

        // The rank forgets the group when this arrives, so nothing of the group may follow it.
        if leaves && self.first.is_live(from) {
            let reply = Addressed { subgroup: Some(id), message: Reply::Gone };
            outgoing.push(Outgoing { to: vec![from], reply, charge: None });
        }
        outgoing
    }

    /// Addresses the replies to an event of `from` to the live ranks of the group, and charges them
    /// to `from`.
    ///
    /// Replies of a subgroup are also kept for its ranks that have not opened it.
    fn outgoing(
        &mut self,
        subgroup: Option<SubgroupId>,
        from: Rank,
        replies: Vec<Reply>,
    ) -> Vec<Outgoing> {
        if replies.is_empty() {
            return Vec::new();
        }

        // A rank that opens the group later gets a copy of its own.
        let group = subgroup.and_then(|id| self.subgroups.get(&id));
        let copies = 1 + group.map_or(0, |group| group.unopened.len());
        let meter = self.first.meter(from);
        let mut charged = Vec::with_capacity(replies.len());
        for reply in replies {
            let bytes = reply.data_bytes().map(|bytes| copies * (bytes + KEPT_BYTES));
            let charge = bytes.map(|bytes| Arc::new(meter.charge(bytes)));
            charged.push((reply, charge));
        }

        let mut to: Vec<_> = match subgroup {
            None => self.first.live().collect(),
            Some(id) => {
                let Some(group) = self.subgroups.get_mut(&id) else { return Vec::new() };
                if !group.unopened.is_empty() {
                    group.early.extend(charged.iter().cloned());
                }

                let unopened = &group.unopened;
                group.live().filter(|rank| !unopened.contains(rank)).collect()
            }
        };
        // A rank that the first group has lost may not have gone from this group yet.
        to.retain(|rank| self.first.is_live(*rank));

        let mut outgoing = Vec::with_capacity(charged.len());
        for (message, charge) in charged {
            let reply = Addressed { subgroup, message };
            outgoing.push(Outgoing { to: to.clone(), reply, charge });
        }
        outgoing
    }

    fn state(&self, subgroup: Option<SubgroupId>) -> Option<&HubState> {
        match subgroup {
            None => Some(&self.first),
            Some(id) => self.subgroups.get(&id).map(|group| &group.state),
        }
    }

    pub(crate) fn awaits_acknowledgement(&self, subgroup: Option<SubgroupId>) -> bool {
        self.state(subgroup).is_some_and(HubState::awaits_acknowledgement)
    }

    /// Returns the ranks that have not acknowledged the end of one of their groups.
    ///
    /// The result has their numbers in the first group. A rank that has not opened a group does not
    /// know that it has ended.
    fn unacknowledged(&self) -> impl Iterator<Item = Rank> {
        let of_subgroups = self.subgroups.values().flat_map(Subgroup::unacknowledged);
        self.first.unacknowledged().chain(of_subgroups)
    }

    /// Returns whether a rank may still acknowledge the end of one of its groups.
    ///
    /// A rank whose process is stopped acknowledges nothing.
    pub(crate) fn awaits_any_acknowledgement(&self) -> bool {
        self.unacknowledged().any(|rank| !self.first.is_stopped(rank))
    }

    /// Marks the end of a group as acknowledged, even if ranks have not answered, and returns the
    /// reply.
    pub(crate) fn stop_waiting(&mut self, subgroup: Option<SubgroupId>) -> Vec<Outgoing> {
        let state = match subgroup {
            None => Some(&mut self.first),
            Some(id) => self.subgroups.get_mut(&id).map(|group| &mut group.state),
        };
        let replies = state.map(HubState::stop_waiting).unwrap_or_default();

        // The reply has no data, so it counts for no rank, whatever rank is passed.
        self.outgoing(subgroup, Rank(0), replies)
    }
}

type SendRequest = dyn Fn(Addressed<Request>) -> Result<(), String> + Send + Sync;

/// Implements one rank's side of a group and of all its subgroups, without the transport to the
/// hub.
pub(super) struct Clients {
    first: Arc<Client>,
    subgroups: Mutex<BTreeMap<SubgroupId, Side>>,
    /// Sends a request to the hub, or returns the reason why the hub can no longer be reached.
    send: Box<SendRequest>,
}

/// Tracks whether this rank still takes part in a subgroup.
enum Side {
    Open(Arc<Client>),
    /// This rank has left the subgroup, but the hub has not confirmed it yet.
    Left,
}

impl Clients {
    pub(super) fn new(
        first: Arc<Client>,
        send: impl Fn(Addressed<Request>) -> Result<(), String> + Send + Sync + 'static,
    ) -> Self {
        Self { first, subgroups: Mutex::default(), send: Box::new(send) }
    }

    pub(super) fn first(&self) -> &Arc<Client> {
        &self.first
    }

    fn subgroups(&self) -> MutexGuard<'_, BTreeMap<SubgroupId, Side>> {
        self.subgroups.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sends a request to the hub.
    ///
    /// If that fails, all groups of this rank lose the hub.
    pub(super) fn send(&self, subgroup: Option<SubgroupId>, message: Request) {
        if let Err(how) = (self.send)(Addressed { subgroup, message }) {
            self.close(&how);
        }
    }

    /// Passes a reply of the hub to the client of its group, and returns the request, if any, in
    /// answer.
    pub(super) fn receive(&self, reply: Addressed<Reply>) -> Option<Addressed<Request>> {
        let Addressed { subgroup, message: reply } = reply;

        let client = match subgroup {
            None => Arc::clone(&self.first),
            Some(id) => {
                let mut subgroups = self.subgroups();
                if reply == Reply::Gone {
                    subgroups.remove(&id);
                    return None;
                }

                // If the side is not open, this rank has left the group, because the hub sends
                // nothing before the rank has opened it.
                let Some(Side::Open(client)) = subgroups.get(&id) else { return None };
                Arc::clone(client)
            }
        };

        // The listener runs here without the lock, because it may send, and a send that fails
        // closes all groups, which takes the lock.
        client.receive(reply).map(|message| Addressed { subgroup, message })
    }

    /// Tells the clients of all groups that the connection to the hub has closed.
    pub(super) fn close(&self, how: &str) {
        self.first.close(how.to_owned());

        // Collected first, because listeners may send, and a send that fails takes the lock.
        let open = |side: &Side| match side {
            Side::Open(client) => Some(Arc::clone(client)),
            Side::Left => None,
        };
        let clients: Vec<_> = self.subgroups().values().filter_map(open).collect();
        for client in clients {
            client.close(how.to_owned());
        }
    }

    /// Opens a subgroup of `ranks`, numbered as in the first group, and returns the bootstrap of
    /// this rank.
    pub(super) fn open(
        self: &Arc<Self>,
        number: u32,
        ranks: Vec<Rank>,
        host: &str,
        relay: Option<Rank>,
    ) -> Result<SubgroupBootstrap, Error> {
        let index = ranks.iter().position(|rank| *rank == self.first.rank()).ok_or_else(|| {
            let text = format!("subgroup: rank {} is not one of its ranks", self.first.rank());
            Error::new(ErrorKind::InvalidArgument, text)
        })?;

        let id = SubgroupId { leader: ranks[0].0, number };
        let hub = relay.and_then(|relay| ranks.iter().position(|rank| *rank == relay));
        let own = Rank::at(index);
        let client = Arc::new(self.first.of_subgroup(own, ranks.len(), hub.map(Rank::at)));

        // The answers of the hub to the request can come at once, so the client is inserted first.
        self.subgroups().insert(id, Side::Open(Arc::clone(&client)));
        let numbers = ranks.iter().map(|rank| rank.0).collect();
        self.send(Some(id), Request::Open { ranks: numbers });

        // `close` did not reach the group if the connection closed before the group was inserted.
        if let Some(how) = self.first.closed_how() {
            client.close(how);
        }

        let clients = Arc::clone(self);
        let host = host.to_owned();
        Ok(SubgroupBootstrap { clients, client, id, ranks, host, relay })
    }
}

/// Connects this rank to the other ranks of a subgroup.
pub(super) struct SubgroupBootstrap {
    clients: Arc<Clients>,
    client: Arc<Client>,
    id: SubgroupId,
    ranks: Vec<Rank>,
    host: String,
    /// The rank that relays messages, by its number in the first group.
    relay: Option<Rank>,
}

impl SubgroupBootstrap {
    fn send(&self, request: Request) {
        self.clients.send(Some(self.id), request);
    }

    /// Marks the subgroup as left, and returns whether this rank took part in the subgroup until
    /// now.
    fn forget(&self) -> bool {
        let mut subgroups = self.clients.subgroups();
        let side = subgroups.get_mut(&self.id).map(|side| mem::replace(side, Side::Left));

        matches!(side, Some(Side::Open(_)))
    }
}

// SAFETY: every exchange has a sequence number, and its contributions are passed on unchanged to
// the ranks of this group. The client never changes its `rank` and `ranks`, which are those of the
// agreed members.
unsafe impl Bootstrap for SubgroupBootstrap {
    fn rank(&self) -> Rank {
        self.client.rank()
    }

    fn ranks(&self) -> usize {
        self.client.ranks()
    }

    fn host(&self) -> &str {
        &self.host
    }

    fn exchange(
        &self,
        label: &str,
        mine: &[u8],
        deadline: Deadline,
    ) -> Result<Vec<Vec<u8>>, Error> {
        self.client.exchange(label, mine, deadline, |request| self.send(request))
    }

    fn missing(&self) -> Vec<Rank> {
        self.client.missing()
    }

    fn broadcast(&self, message: &[u8]) -> Result<(), Error> {
        self.client.check_send("broadcast", message)?;
        self.send(Request::Broadcast { message: Blob(message.to_vec()) });
        Ok(())
    }

    fn relay(&self) -> Option<Rank> {
        self.client.relay()
    }

    fn shares_process(&self) -> bool {
        self.clients.first().shares_process()
    }

    fn abort(&self, record: &[u8]) -> Result<(), Error> {
        self.client.check_send("abort", record)?;
        self.send(Request::Abort { record: Blob(record.to_vec()) });
        Ok(())
    }

    fn listen(&self, listener: Arc<dyn Listener>) {
        self.client.listen(listener);
    }

    fn leave(&self, _deadline: Deadline) -> Result<(), Error> {
        if self.client.begin_leave()? {
            // Afterwards `disconnect` does not give up a group that this rank has left.
            self.forget();
            self.send(Request::Leave);
        }
        Ok(())
    }

    fn process(&self, rank: Rank) -> ProcessState {
        let first_rank = self.ranks.get(rank.index());
        first_rank.map_or(ProcessState::Unknown, |rank| self.clients.first().process(*rank))
    }

    fn relay_process(&self) -> ProcessState {
        self.clients.first().relay_process()
    }

    fn disconnect(&self) {
        self.client.stop_notifications();

        if self.forget() {
            let how = "its group was dropped before the rank left it";
            self.send(Request::GiveUp { how: how.into() });
        }
    }

    fn shrink(&self, _: &[Rank], _: Deadline) -> Result<Box<dyn Bootstrap>, Error> {
        let text = "shrink: this group was split from another one; shrink that group, and split the new one";
        Err(Error::new(ErrorKind::Unavailable, text))
    }

    fn subgroup(&self, number: u32, members: &[Rank]) -> Result<Box<dyn Bootstrap>, Error> {
        let ranks = members.iter().map(|member| self.ranks[member.index()]).collect();

        let opened = self.clients.open(number, ranks, &self.host, self.relay)?;
        Ok(Box::new(opened))
    }
}

impl Drop for SubgroupBootstrap {
    fn drop(&mut self) {
        self.disconnect();
    }
}

impl fmt::Debug for SubgroupBootstrap {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SubgroupBootstrap")
            .field("rank", &self.client.rank())
            .field("ranks", &self.ranks)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hub::Joining;

    fn joined(ranks: usize) -> HubGroups {
        let mut groups = HubGroups::new(ranks);
        for rank in Rank::all(ranks) {
            groups.apply(rank, Addressed::to_all(Event::Joined(Joining::default())));
        }
        groups
    }

    fn request(group: u32, message: Request) -> Addressed<Event> {
        let subgroup = Some(SubgroupId { leader: 0, number: group });
        Addressed { subgroup, message: Event::Request(message) }
    }

    fn open(group: u32) -> Addressed<Event> {
        request(group, Request::Open { ranks: vec![0, 1] })
    }

    fn message(bytes: usize) -> Request {
        Request::Broadcast { message: Blob(vec![0; bytes]) }
    }

    #[test]
    fn a_rank_receives_what_was_sent_before_it_opened_the_group() {
        let mut groups = joined(2);
        assert!(groups.apply(Rank(1), open(7)).is_empty());
        let own = groups.apply(Rank(1), request(7, message(5)));
        assert_eq!(own.iter().map(|out| out.to.clone()).collect::<Vec<_>>(), [[Rank(1)]]);

        let early = groups.apply(Rank(0), open(7));
        assert_eq!((early.len(), &early[0].to), (1, &vec![Rank(0)]));
        let expected = Reply::Message { from: 1, message: Blob(vec![0; 5]) };
        assert_eq!(early[0].reply.message, expected);
        let sent = groups.apply(Rank(1), request(7, message(6)));
        assert_eq!(sent[0].to, [Rank(0), Rank(1)]);

        // What is left is the group, which was charged to the rank that was the first to open it.
        drop((own, early, sent));
        assert_eq!(groups.first.meter(Rank(0)).bytes(), 0);
        let group_bytes = groups.first.meter(Rank(1)).bytes();
        assert!((1..4096).contains(&group_bytes), "{group_bytes}");
        for rank in [0, 1] {
            groups.apply(Rank(rank), request(7, Request::Leave));
        }
        assert_eq!(groups.first.meter(Rank(1)).bytes(), 0);
    }

    #[test]
    fn a_rank_for_which_the_hub_keeps_too_much_is_lost_in_all_groups() {
        // Contributions to exchanges of several groups, which the other rank has not begun.
        let mut groups = joined(2);
        let contribute = || Request::Contribute { label: "a".into(), blob: Blob(vec![0; 3 << 20]) };
        let mut sent = 0;
        for group in 0.. {
            groups.apply(Rank(1), open(group));
            groups.apply(Rank(1), request(group, contribute()));
            sent += 1;
            if !groups.first.is_live(Rank(1)) {
                break;
            }
        }
        assert_eq!(sent, 6);
        let lost = groups.first.end_cause().unwrap().to_string();
        assert!(lost.starts_with("rank 1 is lost: the hub keeps 188"), "{lost}");
        assert!(lost.ends_with("in messages, exchanges and groups, expected at most 16779264"));

        // Messages that others have not received; what they have received does not count.
        let mut groups = joined(2);
        for _ in 0..100 {
            groups.apply(Rank(1), Addressed::to_all(Event::Request(message(3 << 20))));
        }
        assert!(groups.first.is_live(Rank(1)));
        let mut unread = Vec::new();
        while groups.first.is_live(Rank(1)) {
            unread.extend(groups.apply(Rank(1), Addressed::to_all(Event::Request(message(1)))));
        }
        assert_eq!(unread.len(), (groups.kept_bytes_max / (KEPT_BYTES + 1)) + 2);
    }

    #[test]
    fn a_rank_that_opens_a_group_twice_or_not_at_all_is_lost() {
        let mut groups = joined(2);
        groups.apply(Rank(1), open(7));
        groups.apply(Rank(0), open(7));
        groups.apply(Rank(0), open(7));
        let lost = groups.first.end_cause().unwrap().to_string();
        assert_eq!(lost, "rank 0 is lost: it opened a group twice");

        let mut groups = joined(2);
        groups.apply(Rank(1), open(7));
        groups.apply(Rank(0), request(7, message(1)));
        let lost = groups.first.end_cause().unwrap().to_string();
        assert_eq!(lost, "rank 0 is lost: it sent a message of a group that it has not opened");
    }

    #[test]
    fn a_rank_that_opens_a_group_with_wrong_members_is_lost() {
        for (ranks, problem) in [
            (vec![0, 1, 1], "it opened a group of 3 ranks, but a rank is in it twice"),
            (vec![0, 1, 3], "it opened a group of 3 ranks, but a rank of it does not exist"),
            (vec![0, 2], "it opened a group of 2 ranks, but the rank itself is not in it"),
            (vec![1, 0], "it opened a group of 2 ranks, but its first rank does not lead it"),
        ] {
            let mut groups = joined(3);
            groups.apply(Rank(1), request(7, Request::Open { ranks }));
            assert_eq!(
                groups.first.end_cause().unwrap().to_string(),
                format!("rank 1 is lost: {problem}")
            );
        }

        // The rank that leads the group knows its members.
        for order in [[0, 1], [1, 0]] {
            let mut groups = joined(3);
            for from in order {
                let ranks = if from == 0 { vec![0, 1, 2] } else { vec![0, 1] };
                groups.apply(Rank(from), request(7, Request::Open { ranks }));
            }
            let cause = groups.first.end_cause().unwrap().to_string();
            assert!(
                cause.starts_with("rank 1 is lost: it opened a group of other ranks"),
                "{cause}"
            );
        }
    }
}
