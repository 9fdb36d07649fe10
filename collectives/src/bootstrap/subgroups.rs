//! Carries the messages of a group and of the groups split from it over the same connections.
//!
//! Each group has a [`HubState`] in the hub and a [`Client`] on each of its ranks; messages say which group they belong to. A
//! rank that is lost is lost by all of its groups.

use std::collections::BTreeMap;
use std::fmt;
use std::mem;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use peerlane_hal::{Deadline, ErrorKind, Rank};
use serde::{Deserialize, Serialize};

use super::client::{Client, too_many_messages};
use super::hub::{Event, HubState};
use super::message::{Blob, EndCause, Reply, Request};
use super::{Bootstrap, Listener, ProcessState};
use crate::error::Error;

/// Identifies a group that was split from another one: its first rank, by the number in the first group, and a number that
/// this rank has chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(crate) struct SubgroupId {
    pub(crate) leader: u32,
    pub(crate) number: u32,
}

/// A message and the group that it belongs to; `None` is the first group.
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

/// The states of all groups in the hub.
pub(crate) struct HubGroups {
    first: HubState,
    subgroups: BTreeMap<SubgroupId, Subgroup>,
}

struct Subgroup {
    /// The numbers of the ranks in the first group.
    ranks: Vec<Rank>,
    state: HubState,
}

impl Subgroup {
    fn apply(&mut self, from: Rank, event: Event) -> Vec<Reply> {
        let own = self.ranks.iter().position(|rank| *rank == from);
        own.map_or_else(Vec::new, |own| self.state.apply(Rank::at(own), event))
    }

    fn live(&self) -> Vec<Rank> {
        self.state.live().map(|rank| self.ranks[rank.index()]).collect()
    }
}

/// A reply of the hub, with the ranks that receive it.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Outgoing {
    pub(crate) to: Vec<Rank>,
    pub(crate) reply: Addressed<Reply>,
}

impl HubGroups {
    pub(crate) fn new(ranks: usize) -> Self {
        Self { first: HubState::new(ranks), subgroups: BTreeMap::new() }
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

    /// Applies an event of a rank to one of its groups. Losing or leaving the first group ends its part in all others.
    pub(crate) fn apply(&mut self, from: Rank, event: Addressed<Event>) -> Vec<Outgoing> {
        let Addressed { subgroup, message: event } = event;
        match (subgroup, event) {
            (None, event) => self.apply_to_first(from, event),
            (Some(_), _) if !self.first.is_live(from) => Vec::new(),
            (Some(id), Event::Request(Request::Open { ranks })) => self.open(id, &ranks),
            (Some(id), event) => self.apply_to_subgroup(id, from, event),
        }
    }

    fn apply_to_first(&mut self, from: Rank, event: Event) -> Vec<Outgoing> {
        let was_live = self.first.is_live(from);
        let replies = self.first.apply(from, event);
        let mut outgoing = self.outgoing(None, replies);
        if was_live && !self.first.is_live(from) {
            let ids = self.subgroups.iter().filter(|(_, group)| group.ranks.contains(&from));
            for id in ids.map(|(id, _)| *id).collect::<Vec<_>>() {
                let event = match self.first.end_cause() {
                    Some(EndCause::Lost { rank, how }) if *rank == from.0 => {
                        Event::Lost { how: how.clone() }
                    }
                    None => Event::Request(Request::Leave),
                    Some(_) => Event::Lost { how: "its connection closed".to_owned() },
                };
                outgoing.extend(self.apply_to_subgroup(id, from, event));
            }
        }
        outgoing
    }

    /// All members have agreed on the group, so they count as joined before their own request arrives.
    fn open(&mut self, id: SubgroupId, ranks: &[u32]) -> Vec<Outgoing> {
        let ranks: Vec<Rank> = ranks.iter().map(|rank| Rank(*rank)).collect();
        let is_known = ranks.iter().all(|rank| self.first.knows(*rank));
        if self.subgroups.contains_key(&id) || !is_known {
            return Vec::new();
        }
        let state = HubState::full(ranks.len());
        let lost: Vec<_> =
            ranks.iter().copied().filter(|rank| !self.first.is_live(*rank)).collect();
        self.subgroups.insert(id, Subgroup { ranks, state });
        let how = "it was lost while the group was split";
        let lost = lost.into_iter();
        lost.flat_map(|rank| self.apply_to_subgroup(id, rank, Event::Lost { how: how.into() }))
            .collect()
    }

    fn apply_to_subgroup(&mut self, id: SubgroupId, from: Rank, event: Event) -> Vec<Outgoing> {
        let event = match event {
            Event::Request(Request::GiveUp { how }) => Event::Lost { how },
            event => event,
        };
        let leaves = matches!(event, Event::Lost { .. } | Event::Request(Request::Leave));
        let group = self.subgroups.get_mut(&id);
        let replies = group.map_or_else(Vec::new, |group| group.apply(from, event));
        let mut outgoing = self.outgoing(Some(id), replies);
        if self.subgroups.get(&id).is_some_and(|group| group.live().is_empty()) {
            self.subgroups.remove(&id);
        }
        if leaves && self.first.is_live(from) {
            let reply = Addressed { subgroup: Some(id), message: Reply::Gone };
            outgoing.push(Outgoing { to: vec![from], reply });
        }
        outgoing
    }

    fn outgoing(&self, subgroup: Option<SubgroupId>, replies: Vec<Reply>) -> Vec<Outgoing> {
        if replies.is_empty() {
            return Vec::new();
        }
        let mut to = match subgroup {
            None => self.first.live().collect(),
            Some(id) => self.subgroups.get(&id).map(Subgroup::live).unwrap_or_default(),
        };
        to.retain(|rank| self.first.is_live(*rank));
        let one = |message| Outgoing { to: to.clone(), reply: Addressed { subgroup, message } };
        replies.into_iter().map(one).collect()
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

    /// Returns the ranks that have not acknowledged the end of one of their groups, by their numbers in the first group.
    fn unacknowledged(&self) -> impl Iterator<Item = Rank> {
        let of_subgroups = self
            .subgroups
            .values()
            .flat_map(|group| group.state.unacknowledged().map(|rank| group.ranks[rank.index()]));
        self.first.unacknowledged().chain(of_subgroups)
    }

    /// Returns whether a rank may still acknowledge the end of one of its groups. One whose process is stopped does not.
    pub(crate) fn awaits_any_acknowledgement(&self) -> bool {
        self.unacknowledged().any(|rank| !self.first.is_stopped(rank))
    }

    /// Tells the ranks of a group that its end is acknowledged, although not all have answered.
    pub(crate) fn stop_waiting(&mut self, subgroup: Option<SubgroupId>) -> Vec<Outgoing> {
        let state = match subgroup {
            None => Some(&mut self.first),
            Some(id) => self.subgroups.get_mut(&id).map(|group| &mut group.state),
        };
        let replies = state.map(HubState::stop_waiting).unwrap_or_default();
        self.outgoing(subgroup, replies)
    }
}

type Send = dyn Fn(Addressed<Request>) -> Result<(), String> + std::marker::Send + Sync;

/// One rank's side of a group and of the groups split from it.
pub(super) struct Clients {
    first: Arc<Client>,
    subgroups: Mutex<BTreeMap<SubgroupId, Side>>,
    /// Sends a request to the hub, or says why the hub can no longer be reached.
    send: Box<Send>,
}

/// The state of a subgroup on a rank.
enum Side {
    /// Another rank has sent messages of so many bytes before this one has opened the group.
    Early(Vec<Reply>, usize),
    Open(Arc<Client>),
    /// This rank has left, but the hub does not know it yet.
    Left,
}

impl Clients {
    pub(super) fn new(
        first: Arc<Client>,
        send: impl Fn(Addressed<Request>) -> Result<(), String> + std::marker::Send + Sync + 'static,
    ) -> Self {
        Self { first, subgroups: Mutex::default(), send: Box::new(send) }
    }

    pub(super) fn first(&self) -> &Arc<Client> {
        &self.first
    }

    fn subgroups(&self) -> MutexGuard<'_, BTreeMap<SubgroupId, Side>> {
        self.subgroups.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn send(&self, subgroup: Option<SubgroupId>, message: Request) {
        if let Err(how) = (self.send)(Addressed { subgroup, message }) {
            self.close(&how);
        }
    }

    /// Handles a reply of the hub, and returns the request that answers it.
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
                match subgroups.entry(id).or_insert_with(|| Side::Early(Vec::new(), 0)) {
                    Side::Early(replies, bytes) => {
                        // The hub limits what a rank contributes to exchanges ahead of others.
                        if let Reply::Message { from, message } = &reply {
                            *bytes += message.0.len() + size_of::<Reply>();
                            if let Some(record) = too_many_messages(Rank(*from), *bytes) {
                                let record = Blob(record.encode());
                                return Some(Addressed {
                                    subgroup,
                                    message: Request::Abort { record },
                                });
                            }
                        }
                        replies.push(reply);
                        return None;
                    }
                    Side::Left => return None,
                    Side::Open(client) => Arc::clone(client),
                }
            }
        };
        client.receive(reply).map(|message| Addressed { subgroup, message })
    }

    /// Reports to all groups that the connection to the hub has closed.
    pub(super) fn close(&self, how: &str) {
        self.first.close(how.to_owned());
        let open = |side: &Side| match side {
            Side::Open(client) => Some(Arc::clone(client)),
            _ => None,
        };
        let clients: Vec<_> = self.subgroups().values().filter_map(open).collect();
        clients.into_iter().for_each(|client| client.close(how.to_owned()));
    }

    /// Opens a subgroup of `ranks`, which are numbers in the first group.
    pub(super) fn open(
        self: &Arc<Self>,
        number: u32,
        ranks: Vec<Rank>,
        host: &str,
        relay: Option<Rank>,
    ) -> Result<SubgroupBootstrap, Error> {
        let own = ranks.iter().position(|rank| *rank == self.first.rank()).ok_or_else(|| {
            let text = format!("subgroup: rank {} is not one of its ranks", self.first.rank());
            Error::new(ErrorKind::InvalidArgument, text)
        })?;
        let id = SubgroupId { leader: ranks[0].0, number };
        let hub = relay.and_then(|relay| ranks.iter().position(|rank| *rank == relay));
        let client = Client::of_subgroup(Rank::at(own), ranks.len(), hub.map(Rank::at));
        let client = Arc::new(client);
        let numbers = ranks.iter().map(|rank| rank.0).collect();
        self.send(Some(id), Request::Open { ranks: numbers });
        let mut subgroups = self.subgroups();
        let answers: Vec<_> = match subgroups.insert(id, Side::Open(Arc::clone(&client))) {
            Some(Side::Early(replies, _)) => {
                replies.into_iter().filter_map(|reply| client.receive(reply)).collect()
            }
            _ => Vec::new(),
        };
        drop(subgroups);
        answers.into_iter().for_each(|answer| self.send(Some(id), answer));
        if let Some(how) = self.first.closed_how() {
            client.close(how);
        }
        let (clients, host) = (Arc::clone(self), host.to_owned());
        Ok(SubgroupBootstrap { clients, client, id, ranks, host, relay })
    }
}

/// The bootstrap of a group that was split from another one.
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

    /// Notes that this rank has left the group, and returns whether it had not before.
    fn forget(&self) -> bool {
        let mut subgroups = self.clients.subgroups();
        let side = subgroups.get_mut(&self.id).map(|side| mem::replace(side, Side::Left));
        matches!(side, Some(Side::Open(_)))
    }
}

// SAFETY: every exchange has a sequence number, and its contributions are passed on unchanged to the ranks of this group.
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

    #[test]
    fn messages_before_a_group_is_open_are_limited() {
        let first = Arc::new(Client::new(Rank(1), 2));
        let clients = Clients::new(first, |_| Ok(()));
        let subgroup = Some(SubgroupId { leader: 0, number: 0 });
        let message = Reply::Message { from: 0, message: Blob(vec![0; 1 << 20]) };
        let receive = || clients.receive(Addressed { subgroup, message: message.clone() });
        let answers: Vec<_> = (0..20).map_while(|_| receive().map_or(Some(()), |_| None)).collect();
        assert_eq!(answers.len(), 15);
        let Some(Addressed { message: Request::Abort { record }, .. }) = receive() else {
            panic!("no abort")
        };
        let record = crate::bootstrap::AbortRecord::decode(&record.0, Rank(1));
        assert_eq!(record.peer, Some(Rank(0)));
    }
}
