//! Defines the commands of a queue.

use std::ffi::c_void;
use std::sync::Arc;

use super::completion::Completion;
use super::copy::{Copy, Fill};
use super::counters::Counter;
use super::fault::Fault;
use super::graph::Launch;
use super::jitter;
use super::machine::memory;
use super::reduce::Reduce;
use super::session::Session;
use super::settings::Setting;
use super::start::Start;
use super::words::Word;

/// A function of the caller that a queue calls.
#[derive(Clone, Copy, Debug)]
pub(crate) struct HostCall {
    pub(crate) function: unsafe extern "C" fn(*mut c_void),
    pub(crate) data: *mut c_void,
}

// SAFETY: the caller of the API promises that the queue's thread may call the function.
unsafe impl Send for HostCall {}
// SAFETY: as above; it is called once at a time, by the thread of one queue.
unsafe impl Sync for HostCall {}

#[derive(Clone, Debug)]
pub(crate) enum Command {
    Copy(Copy),
    Fill(Fill),
    /// Runs memory operations, in their order.
    Words(Arc<[Word]>),
    /// Completes when every earlier command is done.
    Finish(Arc<Completion>),
    /// Blocks later commands until the completion is done.
    Await(Arc<Completion>),
    Launch(Launch),
    Reduce(Reduce),
    Start(Start),
    Call(HostCall),
    /// Frees an allocation.
    Release(u64),
}

impl Command {
    pub(crate) fn run(&self, session: &Session) -> Result<(), Fault> {
        match self {
            Self::Copy(copy) => copy.run(session, memory()),
            Self::Fill(fill) => fill.run(session, memory()),
            Self::Words(words) => run_words(words, session),
            Self::Finish(completion) => {
                pause();
                completion.finish();
                Ok(())
            }
            Self::Await(completion) => {
                completion.wait(|| session.fault().is_some());
                Ok(())
            }
            Self::Launch(launch) => launch.run(session),
            Self::Reduce(reduce) => {
                pause();
                reduce.run(session, memory())
            }
            Self::Start(start) => {
                pause();
                start.run(session, memory())
            }
            Self::Call(call) => {
                // SAFETY: the submitter promised that the function may be called with its data.
                unsafe { (call.function)(call.data) };
                Ok(())
            }
            Self::Release(base) => {
                memory().remove(*base, |_| true).map_err(|_| Fault::IllegalAddress)
            }
        }
    }

    /// Drops the command on a broken session, and releases the threads that wait for it.
    pub(crate) fn abandon(&self) {
        match self {
            Self::Finish(completion) => completion.finish(),
            Self::Launch(launch) => launch.abandon(),
            _ => {}
        }
    }
}

fn run_words(words: &[Word], session: &Session) -> Result<(), Fault> {
    pause();
    if words.len() > 1 {
        Counter::Batches.add(session.device(), 1);
        Counter::BatchedWords.add(session.device(), words.len() as i64);
    } else {
        Counter::SingleWords.add(session.device(), words.len() as i64);
    }
    if Setting::BatchOrder.is("parallel") {
        let (waits, writes): (Vec<&Word>, Vec<&Word>) =
            words.iter().partition(|word| word.wait.is_some());
        let reordered = writes.into_iter().rev().chain(waits);
        return reordered.into_iter().try_for_each(|word| word.run(session, memory()));
    }
    words.iter().try_for_each(|word| word.run(session, memory()))
}

fn pause() {
    let delay = jitter::next();
    if !delay.is_zero() {
        std::thread::sleep(delay);
    }
}
