//! Captures the commands of queues as the nodes of a graph.
//!
//! A capture begins on one queue, its origin. A queue that waits for an event recorded in the
//! capture joins it. Its work must be joined to the origin, by an event as well, before the origin
//! ends the capture.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::thread::ThreadId;

use super::command::Command;
use super::graph::Node;
use super::queue::Queue;
use super::session::Session;
use super::sync::lock;

/// Selects the threads in which a capture forbids unsafe calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mode {
    Global,
    ThreadLocal,
    Relaxed,
}

/// Why a call failed because of a capture.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CaptureError {
    Unsupported,
    Invalidated,
    Merge,
    Unmatched,
    Unjoined,
    Isolation,
    Implicit,
    CapturedEvent,
    WrongThread,
    /// It has begun already, or not at all.
    State,
}

#[derive(Debug)]
pub(crate) struct Capture {
    id: u64,
    mode: Mode,
    thread: ThreadId,
    invalid: AtomicBool,
    ended: AtomicBool,
    nodes: Mutex<Vec<Node>>,
    queues: Mutex<Vec<Weak<Queue>>>,
}

/// A queue's membership in a capture.
#[derive(Clone, Debug)]
pub(crate) struct Member {
    capture: Arc<Capture>,
    is_origin: bool,
    /// The nodes that what is recorded next comes after.
    tail: Vec<usize>,
}

static ACTIVE: Mutex<Vec<Weak<Capture>>> = Mutex::new(Vec::new());

impl Capture {
    /// Begins a capture on this queue.
    pub(crate) fn begin(queue: &Arc<Queue>, mode: Mode) -> Result<(), CaptureError> {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        let capture = Arc::new(Self {
            id: NEXT.fetch_add(1, Ordering::Relaxed),
            mode,
            thread: std::thread::current().id(),
            invalid: AtomicBool::new(false),
            ended: AtomicBool::new(false),
            nodes: Mutex::default(),
            queues: Mutex::new(vec![Arc::downgrade(queue)]),
        });
        queue.with_member(|member| {
            if member.is_some() {
                return Err(CaptureError::State);
            }
            *member = Some(Member { capture: capture.clone(), is_origin: true, tail: Vec::new() });
            Ok(())
        })?;
        let mut active = lock(&ACTIVE);
        active.retain(|capture| capture.strong_count() > 0);
        active.push(Arc::downgrade(&capture));
        Ok(())
    }

    /// Ends the capture that began on this queue, and returns its nodes.
    pub(crate) fn end(queue: &Arc<Queue>) -> Result<Vec<Node>, CaptureError> {
        let member = queue.with_member(|member| {
            let found = member.as_ref().ok_or(CaptureError::State)?;
            if !found.is_origin {
                found.capture.invalidate();
                return Err(CaptureError::Unmatched);
            }
            let capture = &found.capture;
            let own_thread = capture.thread == std::thread::current().id();
            if capture.mode != Mode::Relaxed && !own_thread {
                return Err(CaptureError::WrongThread);
            }
            member.take().ok_or(CaptureError::State)
        })?;
        let capture = member.capture;
        capture.ended.store(true, Ordering::Release);
        for other in lock(&capture.queues).drain(..).filter_map(|queue| queue.upgrade()) {
            other.with_member(|member| {
                if member.as_ref().is_some_and(|member| member.capture.id == capture.id) {
                    *member = None;
                }
            });
        }
        if capture.invalid.load(Ordering::Acquire) {
            return Err(CaptureError::Invalidated);
        }
        let nodes = std::mem::take(&mut *lock(&capture.nodes));
        if reached_from(&nodes, &member.tail).contains(&false) {
            return Err(CaptureError::Unjoined);
        }
        Ok(nodes)
    }

    pub(crate) fn id(&self) -> u64 {
        self.id
    }

    pub(crate) fn invalidate(&self) {
        self.invalid.store(true, Ordering::Release);
    }

    pub(crate) fn is_invalid(&self) -> bool {
        self.invalid.load(Ordering::Acquire)
    }

    pub(crate) fn is_active(&self) -> bool {
        !self.ended.load(Ordering::Acquire)
    }

    fn add(&self, node: Node) -> usize {
        let mut nodes = lock(&self.nodes);
        nodes.push(node);
        nodes.len() - 1
    }
}

impl Member {
    pub(crate) fn capture(&self) -> &Arc<Capture> {
        &self.capture
    }

    pub(crate) fn tail(&self) -> &[usize] {
        &self.tail
    }

    /// Adds a command after the last one of the queue.
    pub(super) fn record(
        &mut self,
        command: Command,
        session: &Arc<Session>,
    ) -> Result<(), CaptureError> {
        if self.capture.is_invalid() {
            return Err(CaptureError::Invalidated);
        }
        let after = std::mem::take(&mut self.tail);
        self.tail = vec![self.capture.add(Node { command, session: session.clone(), after })];
        Ok(())
    }
}

/// Orders the queue after nodes of a capture; the queue joins the capture if necessary.
pub(crate) fn join(
    queue: &Arc<Queue>,
    capture: &Arc<Capture>,
    nodes: &[usize],
) -> Result<(), CaptureError> {
    if capture.is_invalid() {
        return Err(CaptureError::Invalidated);
    }
    let joined = queue.with_member(|member| match member {
        Some(member) if member.capture.id == capture.id => {
            let new = nodes.iter().filter(|node| !member.tail.contains(node)).copied();
            let new: Vec<usize> = new.collect();
            member.tail.extend(new);
            Ok(false)
        }
        Some(member) => {
            member.capture.invalidate();
            capture.invalidate();
            Err(CaptureError::Merge)
        }
        None => {
            let capture = capture.clone();
            *member = Some(Member { capture, is_origin: false, tail: nodes.to_vec() });
            Ok(true)
        }
    })?;
    if joined {
        lock(&capture.queues).push(Arc::downgrade(queue));
    }
    Ok(())
}

/// Fails if this thread's mode forbids a call that might disturb a capture. The captures that it
/// would disturb become invalid.
pub(crate) fn refuse_unsafe_call(own: Mode) -> Result<(), CaptureError> {
    if own == Mode::Relaxed {
        return Ok(());
    }
    let thread = std::thread::current().id();
    let active: Vec<_> = lock(&ACTIVE).iter().filter_map(Weak::upgrade).collect();
    let disturbed = |capture: &Arc<Capture>| match capture.mode {
        Mode::Relaxed => false,
        Mode::ThreadLocal => capture.thread == thread,
        Mode::Global => capture.thread == thread || own == Mode::Global,
    };
    let mut refused = Ok(());
    for capture in active.iter().filter(|it| it.is_active()).filter(|it| disturbed(it)) {
        capture.invalidate();
        refused = Err(CaptureError::Unsupported);
    }
    refused
}

/// Returns for each node whether it is one of `tail` or comes before one.
fn reached_from(nodes: &[Node], tail: &[usize]) -> Vec<bool> {
    let mut reached = vec![false; nodes.len()];
    let mut open = tail.to_vec();
    while let Some(node) = open.pop() {
        if !std::mem::replace(&mut reached[node], true) {
            open.extend(&nodes[node].after);
        }
    }
    reached
}
