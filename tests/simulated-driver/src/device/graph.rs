//! Implements graphs: commands with explicit dependencies, launched any number of times.
//!
//! When a graph is instantiated, its nodes are divided into chains, in which each node depends on
//! its predecessor. Each chain runs on its own thread, and waits only where it depends on another
//! chain.

use std::sync::{Arc, Mutex};

use super::command::Command;
use super::completion::Completion;
use super::counters::Counter;
use super::session::Session;
use super::settings::Setting;
use super::sync::lock;

/// Number of nodes in branches that take all channels: CUDA_DEVICE_MAX_CONNECTIONS is 8 by default.
const CHANNELS: usize = 8;

#[derive(Clone, Debug)]
pub(crate) struct Node {
    pub(crate) command: Command,
    /// The session of the queue that received the command.
    pub(crate) session: Arc<Session>,
    /// The nodes that it depends on, all with smaller numbers.
    pub(crate) after: Vec<usize>,
}

/// An instantiated graph.
#[derive(Debug)]
pub(crate) struct Program {
    nodes: Vec<Node>,
    chains: Vec<Vec<usize>>,
    /// Whether the branches take all channels of the context while the graph runs.
    holds_queues: bool,
    /// Completion of the last launch: launches of one program run one after the other.
    last: Mutex<Option<Arc<Completion>>>,
}

/// One launch of a program.
#[derive(Clone, Debug)]
pub(crate) struct Launch {
    program: Arc<Program>,
    before: Option<Arc<Completion>>,
    done: Option<Arc<Completion>>,
}

impl Program {
    /// `branches_take_channels` is a property of the vendor's graphs.
    pub(crate) fn new(nodes: Vec<Node>, branches_take_channels: bool) -> Arc<Self> {
        let chains = chains(&nodes);
        let branches: usize = chains.iter().skip(1).map(Vec::len).sum();
        let holds_queues =
            branches_take_channels && branches >= CHANNELS && Setting::BranchedGraphs.is("hold");
        Arc::new(Self { nodes, chains, holds_queues, last: Mutex::default() })
    }

    /// Creates the next launch; `place` submits it to a queue.
    pub(crate) fn launch<T, E>(
        self: &Arc<Self>,
        place: impl FnOnce(Launch) -> Result<T, E>,
    ) -> Result<T, E> {
        // Holds the lock until the launch is submitted, so that launches are submitted in order.
        let mut last = lock(&self.last);
        let done = Arc::new(Completion::default());
        let before = last.clone().filter(|before| !before.is_done());
        let launch = Launch { program: self.clone(), before, done: Some(done.clone()) };
        let placed = place(launch)?;
        *last = Some(done);
        Ok(placed)
    }

    /// Creates a launch as a node of another graph, whose launches order it.
    pub(crate) fn nested(self: &Arc<Self>) -> Launch {
        Launch { program: self.clone(), before: None, done: None }
    }

    fn run(&self) {
        let done: Vec<Completion> = self.nodes.iter().map(|_| Completion::default()).collect();
        let done = &done;
        std::thread::scope(|scope| {
            for chain in self.chains.iter().skip(1) {
                scope.spawn(|| self.run_chain(chain, done));
            }
            if let Some(chain) = self.chains.first() {
                self.run_chain(chain, done);
            }
        });
    }

    fn run_chain(&self, chain: &[usize], done: &[Completion]) {
        for &at in chain {
            let node = &self.nodes[at];
            for &before in &node.after {
                done[before].wait(|| false);
            }
            if node.session.fault().is_some() {
                node.command.abandon();
            } else if let Err(fault) = node.command.run(&node.session) {
                node.session.break_with(fault);
            }
            done[at].finish();
        }
    }
}

impl Launch {
    pub(super) fn run(&self, session: &Session) -> Result<(), super::fault::Fault> {
        if let Some(before) = &self.before {
            before.wait(|| session.fault().is_some());
        }
        match self.program.holds_queues {
            true => session.hold_queues(|| self.program.run()),
            false => self.program.run(),
        }
        Counter::GraphLaunches.add(session.device(), 1);
        self.abandon();
        Ok(())
    }

    /// Lets the next launch begin, without running this one.
    pub(super) fn abandon(&self) {
        if let Some(done) = &self.done {
            done.finish();
        }
    }
}

/// Divides the nodes into chains; a node is added to a chain whose last node it depends on.
fn chains(nodes: &[Node]) -> Vec<Vec<usize>> {
    let mut chains: Vec<Vec<usize>> = Vec::new();
    for (at, node) in nodes.iter().enumerate() {
        let follows = chains
            .iter_mut()
            .find(|chain| chain.last().is_some_and(|last| node.after.contains(last)));
        match follows {
            Some(chain) => chain.push(at),
            None => chains.push(vec![at]),
        }
    }
    chains
}
