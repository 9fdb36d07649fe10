//! Receives the messages of peers: puts their bytes in place, stores flags, and notes gets.
//!
//! UCX does not promise an order between messages, so that each has a number, and one that arrives
//! early is held. A message with many bytes arrives in two steps: the bytes follow the header when
//! the receiver has said where they go. Meanwhile later messages are taken, but a flag is stored
//! only when everything before it is in place, and a message is held whose bytes overlap with those
//! that are on their way.

use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use peerlane_hal::Rank;

use super::completions::{Completions, Outcome};
use super::wire::{Answer, Content, FlagStore, Header, Question, RegionByte};
use crate::registration::Registration;
use crate::sys::{Calls, Ended, Receiver, Rendezvous, ReplyTo};

/// What a fabric has received, and what its messages refer to.
#[derive(Debug, Default)]
pub(crate) struct Inbox {
    rank: Rank,
    token: u64,
    /// The regions of this rank by number.
    regions: HashMap<u64, Arc<Registration>>,
    streams: HashMap<StreamId, Stream>,
    /// The receives that go on, by number.
    receives: HashMap<u64, Receive>,
    next_receive: u64,
    /// The gets of this rank that wait for their bytes.
    gets: HashMap<u64, PendingGet>,
    next_get: u64,
    /// Gets of peers whose bytes can be sent now.
    pub(crate) replies: VecDeque<GetReply>,
    /// The questions of this rank that are open, with the answers that have arrived.
    questions: HashMap<u64, Option<Answer>>,
    /// Whether flags were stored, or gets ended, since the last call of
    /// [`take_news`](Self::take_news).
    has_news: bool,
}

/// An engine of a peer.
type StreamId = (Rank, u32);

/// The messages of one engine of a peer.
#[derive(Debug, Default)]
struct Stream {
    /// The number of the next message that is taken.
    next: u64,
    /// The messages that have arrived and are not taken.
    held: BTreeMap<u64, Held>,
    /// The numbers of messages whose bytes are on their way, with the addresses that they go to.
    incoming: Vec<(u64, Range<usize>)>,
    /// Flags that wait for the bytes of all messages before a number.
    flags: VecDeque<(u64, FlagStore)>,
    /// Whether a receive has failed, so that no flag is stored any more.
    is_broken: bool,
}

#[derive(Debug)]
struct Held {
    content: Content,
    arrival: Arrival<'static>,
}

/// The bytes of a message, which are borrowed from UCX while it hands over the message.
#[derive(Debug)]
enum Arrival<'a> {
    Bytes(Cow<'a, [u8]>),
    Rendezvous(Rendezvous, usize),
}

impl Arrival<'_> {
    fn bytes(&self) -> u64 {
        match self {
            Self::Bytes(bytes) => bytes.len() as u64,
            Self::Rendezvous(_, bytes) => *bytes as u64,
        }
    }

    fn into_owned(self) -> Arrival<'static> {
        match self {
            Self::Bytes(bytes) => Arrival::Bytes(Cow::Owned(bytes.into_owned())),
            Self::Rendezvous(message, bytes) => Arrival::Rendezvous(message, bytes),
        }
    }
}

/// A receive that goes on.
#[derive(Debug)]
enum Receive {
    /// The bytes of a put; the region keeps its memory.
    Put { stream: StreamId, sequence: u64, region: u64, _memory: Arc<Registration> },
    /// The bytes of a get.
    Get { request: u64 },
}

/// A get of this rank.
#[derive(Debug)]
pub(crate) struct PendingGet {
    /// The address and the number of bytes of the destination.
    pub(crate) to: (*mut u8, usize),
    pub(crate) completions: Arc<Completions>,
    pub(crate) tag: u64,
}

// SAFETY: the contract of `submit` keeps the destination for the engine, on any thread.
unsafe impl Send for PendingGet {}

/// A get of a peer, whose bytes are sent to it.
#[derive(Debug)]
pub(crate) struct GetReply {
    pub(crate) to: Rank,
    pub(crate) request: u64,
    /// The region with the offset and the number of bytes; `None` if it was freed.
    pub(crate) from: Option<(Arc<Registration>, u64, u64)>,
}

impl Inbox {
    pub(crate) fn new(rank: Rank, token: u64) -> Self {
        Self { rank, token, ..Self::default() }
    }

    pub(crate) fn add_region(&mut self, number: u64, region: &Arc<Registration>) {
        self.regions.insert(number, Arc::clone(region));
    }

    /// Forgets a region, so that later messages for it are dropped.
    pub(crate) fn remove_region(&mut self, number: u64) {
        self.regions.remove(&number);
    }

    /// Returns whether bytes are on their way to a region.
    pub(crate) fn is_receiving(&self, number: u64) -> bool {
        let is_it =
            |receive: &Receive| matches!(receive, Receive::Put { region, .. } if *region == number);
        self.receives.values().any(is_it)
    }

    /// Adds a get of this rank, and returns its number.
    pub(crate) fn add_get(&mut self, get: PendingGet) -> u64 {
        self.next_get += 1;
        self.gets.insert(self.next_get, get);
        self.next_get
    }

    /// Forgets the gets of an engine, but for those whose bytes are on their way, whose tags it
    /// returns.
    pub(crate) fn remove_gets(&mut self, of: &Arc<Completions>) -> Vec<u64> {
        let request = |receive: &Receive| match receive {
            Receive::Get { request } => Some(*request),
            Receive::Put { .. } => None,
        };
        let incoming: Vec<u64> = self.receives.values().filter_map(request).collect();
        let is_of = |get: &PendingGet| Arc::ptr_eq(&get.completions, of);
        self.gets.retain(|request, get| !is_of(get) || incoming.contains(request));
        self.gets.values().filter(|get| is_of(get)).map(|get| get.tag).collect()
    }

    /// Notes that an answer with this number is expected.
    pub(crate) fn open_question(&mut self, request: u64) {
        self.questions.insert(request, None);
    }

    /// Returns the answer to a question, if it has arrived.
    pub(crate) fn answer(&self, request: u64) -> Option<Answer> {
        self.questions.get(&request).copied().flatten()
    }

    /// Forgets a question, so that a later answer is dropped.
    pub(crate) fn close_question(&mut self, request: u64) {
        self.questions.remove(&request);
    }

    /// Returns whether flags were stored or gets ended since the last call.
    pub(crate) fn take_news(&mut self) -> bool {
        std::mem::take(&mut self.has_news)
    }

    fn take(&mut self, calls: &Calls, header: &[u8], arrival: Arrival<'_>) {
        let header = Header::decode(header).filter(|header| header.token == self.token);
        let Some(Header { sender, engine, sequence, content, .. }) = header else {
            return discard(calls, arrival);
        };
        match content {
            Content::Reply { request, is_freed } => {
                return self.end_get(calls, request, is_freed, arrival);
            }
            Content::Answer { request, answer } => {
                if let Some(open) = self.questions.get_mut(&request) {
                    *open = Some(answer);
                    self.has_news = true;
                }
                return discard(calls, arrival);
            }
            _ => {}
        }

        let id = (sender, engine);
        let target = self.target(&content, arrival.bytes());
        let stream = self.streams.entry(id).or_default();
        if sequence < stream.next || stream.held.contains_key(&sequence) {
            // UCX delivers a message once, so the number was not given by an engine.
            return discard(calls, arrival);
        }
        if sequence != stream.next || stream.blocks(&content, &target) {
            stream.held.insert(sequence, Held { content, arrival: arrival.into_owned() });
            return;
        }
        self.apply(calls, id, content, arrival);
        self.take_held(calls, id);
    }

    /// Takes the messages that were held, as far as it is possible now.
    fn take_held(&mut self, calls: &Calls, id: StreamId) {
        while let Some(Held { content, arrival }) = self.pop_held(id) {
            self.apply(calls, id, content, arrival);
        }
    }

    /// Removes the next message from those that are held, if it need not wait.
    fn pop_held(&mut self, id: StreamId) -> Option<Held> {
        let stream = self.streams.get(&id)?;
        let held = stream.held.get(&stream.next)?;
        if stream.blocks(&held.content, &self.target(&held.content, held.arrival.bytes())) {
            return None;
        }
        let stream = self.streams.get_mut(&id)?;
        stream.held.remove(&stream.next)
    }

    /// Returns the addresses that the bytes of a message go to; none if it has no bytes or its
    /// region was freed.
    fn target(&self, content: &Content, bytes: u64) -> Range<usize> {
        let Content::Put { to, .. } = content else { return 0..0 };
        let region = self.regions.get(&to.region);
        let region = region.filter(|region| region.contains(to.offset, bytes));
        region.map_or(0..0, |region| {
            let first = region.address_at(to.offset) as usize;
            first..first + bytes as usize
        })
    }

    /// Does what the next message of an engine says.
    fn apply(&mut self, calls: &Calls, id: StreamId, content: Content, arrival: Arrival<'_>) {
        let stream = self.streams.entry(id).or_default();
        let sequence = stream.next;
        stream.next += 1;

        match content {
            Content::Put { to, before, after } => {
                // The bytes of this message are not among those that hold the first flag.
                stream.flags.extend(before.map(|flag| (sequence, flag)));
                self.store_flags(id);
                self.put(calls, (id, sequence), to, arrival);

                let stream = self.streams.entry(id).or_default();
                stream.flags.extend(after.map(|flag| (sequence + 1, flag)));
                self.store_flags(id);
            }
            Content::Get { from, bytes, request } => {
                let region = self.regions.get(&from.region);
                let region = region.filter(|region| region.contains(from.offset, bytes));
                let from = region.map(|region| (Arc::clone(region), from.offset, bytes));
                self.replies.push_back(GetReply { to: id.0, request, from });
                discard(calls, arrival);
            }
            Content::End => {
                self.streams.remove(&id);
                discard(calls, arrival);
            }
            Content::Reply { .. } | Content::Question { .. } | Content::Answer { .. } => {
                discard(calls, arrival);
            }
        }
    }

    /// Puts the bytes of a message in their place, or drops them if it was freed.
    fn put(
        &mut self,
        calls: &Calls,
        (id, sequence): (StreamId, u64),
        to: RegionByte,
        arrival: Arrival<'_>,
    ) {
        let bytes = arrival.bytes();
        let region = self.regions.get(&to.region);
        let Some(region) = region.filter(|region| region.contains(to.offset, bytes)) else {
            return discard(calls, arrival);
        };

        let at = region.address_at(to.offset);
        match arrival {
            // SAFETY: the region contains the bytes, and lives. The contract of `submit` demands
            // that nobody else accesses the destination.
            Arrival::Bytes(payload) => unsafe {
                payload.as_ptr().copy_to_nonoverlapping(at, payload.len());
            },
            Arrival::Rendezvous(message, bytes) => {
                self.next_receive += 1;
                let tag = self.next_receive;
                let (memory, target) = (Arc::clone(region), at as usize..at as usize + bytes);
                // SAFETY: as above. The receive keeps the region; who frees memory of the caller
                // waits for its end.
                let ended = unsafe { calls.receive(message, (at, bytes), tag) };
                let stream = self.streams.entry(id).or_default();
                match ended {
                    Some(Ok(())) => {}
                    Some(Err(_)) => stream.is_broken = true,
                    None => {
                        stream.incoming.push((sequence, target));
                        let receive = Receive::Put {
                            stream: id,
                            sequence,
                            region: to.region,
                            _memory: memory,
                        };
                        self.receives.insert(tag, receive);
                    }
                }
            }
        }
    }

    /// Stores the flags whose bytes are all in place.
    fn store_flags(&mut self, id: StreamId) {
        let Some(stream) = self.streams.get_mut(&id) else { return };
        if stream.is_broken {
            stream.flags.clear();
        }

        while let Some(&(sequence, FlagStore { region, word, value })) = stream.flags.front() {
            if stream.incoming.iter().any(|(incoming, ..)| *incoming < sequence) {
                return;
            }
            stream.flags.pop_front();
            // A flag of freed memory is dropped.
            if let Some(flag) = self.regions.get(&region).and_then(|region| region.flag(word)) {
                flag.store(value, Ordering::Release);
                self.has_news = true;
            }
        }
    }

    /// Ends a get of this rank with its bytes.
    fn end_get(&mut self, calls: &Calls, request: u64, is_freed: bool, arrival: Arrival<'_>) {
        let fits = |get: &&PendingGet| is_freed || get.to.1 as u64 == arrival.bytes();
        let Some(get) = self.gets.get(&request).filter(fits) else {
            return discard(calls, arrival);
        };

        let outcome = match arrival {
            _ if is_freed => Outcome::Freed,
            // SAFETY: the engine keeps the destination, which has so many bytes, until the get has
            // ended.
            Arrival::Bytes(payload) => unsafe {
                payload.as_ptr().copy_to_nonoverlapping(get.to.0, payload.len());
                Outcome::from_request(Ok(()))
            },
            Arrival::Rendezvous(message, bytes) => {
                self.next_receive += 1;
                let tag = self.next_receive;
                // SAFETY: as above.
                match unsafe { calls.receive(message, (get.to.0, bytes), tag) } {
                    Some(ended) => Outcome::from_request(ended),
                    None => {
                        self.receives.insert(tag, Receive::Get { request });
                        return;
                    }
                }
            }
        };
        self.finish_get(request, outcome);
    }

    /// Answers a question of a peer.
    fn answer_question(&self, calls: &Calls, reply: &ReplyTo<'_>, header: &[u8]) {
        let Some(Header { token, sequence, content, .. }) = Header::decode(header) else { return };
        let Content::Question { request, question } = content else { return };
        let answer = match question {
            _ if token != self.token => Answer::Unknown,
            Question::Hello => Answer::Yes,
            Question::Exists { region, bytes } => match self.regions.get(&region) {
                Some(region) if region.bytes == bytes => Answer::Yes,
                _ => Answer::Freed,
            },
        };
        let content = Content::Answer { request, answer };
        let sender = self.rank;
        let header = Header { token: sequence, sender, engine: 0, sequence: 0, content };
        calls.reply(reply, &header.encode());
    }

    fn finish_get(&mut self, request: u64, outcome: Outcome) {
        if let Some(PendingGet { completions, tag, .. }) = self.gets.remove(&request) {
            completions.push(tag, outcome);
            self.has_news = true;
        }
    }
}

impl Stream {
    /// Returns whether a message has to wait for bytes that are on their way.
    fn blocks(&self, content: &Content, target: &Range<usize>) -> bool {
        match content {
            Content::Put { .. } => self
                .incoming
                .iter()
                .any(|(_, range)| range.start < target.end && target.start < range.end),
            Content::Get { .. } | Content::End => !self.incoming.is_empty(),
            Content::Reply { .. } | Content::Question { .. } | Content::Answer { .. } => false,
        }
    }
}

/// Drops the bytes of a message, so that its sender goes on.
fn discard(calls: &Calls, arrival: Arrival<'_>) {
    if let Arrival::Rendezvous(message, _) = arrival {
        calls.drop_rendezvous(message);
    }
}

impl Receiver for Inbox {
    fn eager(&mut self, calls: &Calls, header: &[u8], payload: &[u8], reply: Option<ReplyTo<'_>>) {
        match reply {
            Some(reply) => self.answer_question(calls, &reply, header),
            None => self.take(calls, header, Arrival::Bytes(payload.into())),
        }
    }

    fn rendezvous(&mut self, calls: &Calls, header: &[u8], bytes: usize, message: Rendezvous) {
        self.take(calls, header, Arrival::Rendezvous(message, bytes));
    }

    fn received(&mut self, calls: &Calls, tag: u64, ended: Ended) {
        match self.receives.remove(&tag) {
            Some(Receive::Get { request }) => {
                self.finish_get(request, Outcome::from_request(ended))
            }
            Some(Receive::Put { stream: id, sequence, .. }) => {
                let is_complete = ended.is_ok();
                if let Some(stream) = self.streams.get_mut(&id) {
                    stream.incoming.retain(|(incoming, ..)| *incoming != sequence);
                    stream.is_broken |= !is_complete;
                }
                self.store_flags(id);
                // The sender or the worker is gone, so that nothing else is received.
                if is_complete {
                    self.take_held(calls, id);
                }
            }
            None => {}
        }
    }
}
