//! Sends and receives the messages of a rank, by one worker of UCX that all its engines share.
//!
//! | file | holds |
//! | --- | --- |
//! | `address.rs` | the address that a rank publishes |
//! | `completions.rs` | the requests of an engine that have ended |
//! | `driver.rs` | the worker with its endpoints, which one thread at a time drives |
//! | `mod.rs` | the peers of a rank, and questions to them |
//! | `receiver.rs` | what is done with messages that arrive |
//! | `thread.rs` | the thread that drives the worker while the rank does not poll |
//! | `wire.rs` | the headers of messages |

mod address;
mod completions;
mod driver;
mod receiver;
mod thread;
mod wire;

use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use peerlane_hal::{Deadline, Rank, RemoteKey as _};
use peerlane_toolkit::{EventParker, Fault, Sleepers};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

pub(crate) use address::Address;
pub(crate) use completions::{Completions, Outcome};
pub(crate) use driver::{DROP_TIMEOUT, Driver};
pub(crate) use receiver::PendingGet;
pub(crate) use wire::{Content, FlagStore, Header, RegionByte};

use crate::error::Error;
use crate::key::Key;
use crate::registration::Registration;
use crate::sys::{Context, Worker};
use receiver::Inbox;
use thread::DrivingThread;
use wire::{Answer, Question};

/// The longest sleep of a rank that waits for an answer, which another thread may receive.
const ANSWER_SLEEP_MAX: Duration = Duration::from_millis(2);

/// The connections of a rank to its peers, and the thread that drives them.
#[derive(Debug)]
pub(crate) struct Network {
    /// Declared first, so that it ends before the worker is destroyed.
    _thread: DrivingThread,
    core: Arc<Core>,
}

impl std::ops::Deref for Network {
    type Target = Core;

    fn deref(&self) -> &Core {
        &self.core
    }
}

/// The connections of a rank to its peers.
#[derive(Debug)]
pub(crate) struct Core {
    pub(crate) rank: Rank,
    /// The number that messages to this rank begin with.
    token: u64,
    driver: Mutex<Driver>,
    /// How often engines have driven the worker.
    drives: AtomicU64,
    /// The number of threads that sleep until the worker has events.
    asleep: AtomicUsize,
    pub(crate) sleepers: Arc<Sleepers>,
    event_fd: OwnedFd,
    /// The addresses of the connected ranks.
    peers: Mutex<Vec<Option<Arc<Address>>>>,
    engines: AtomicU32,
    requests: AtomicU64,
}

impl Network {
    /// Creates the worker, and returns its address too.
    pub(crate) fn open(
        context: &Arc<Context>,
        (rank, ranks): (Rank, usize),
        token: u64,
    ) -> Result<(Self, Vec<u8>), Error> {
        let worker = Worker::create(context, Inbox::new(rank, token))?;
        let (address, event_fd) = (worker.address()?, worker.event_fd()?);

        let core = Arc::new(Core {
            rank,
            token,
            driver: Mutex::new(Driver::new(worker, (rank, ranks))),
            drives: AtomicU64::new(0),
            asleep: AtomicUsize::new(0),
            sleepers: Arc::default(),
            event_fd,
            peers: Mutex::new(vec![None; ranks]),
            engines: AtomicU32::new(0),
            requests: AtomicU64::new(0),
        });
        let thread = DrivingThread::start(&core)?;
        Ok((Self { _thread: thread, core }, address))
    }
}

impl Core {
    /// Returns exclusive access to the worker.
    pub(crate) fn lock(&self) -> MutexGuard<'_, Driver> {
        // A panic cannot leave the state half changed: it is consistent after every statement.
        self.driver.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn new_engine(&self) -> u32 {
        self.engines.fetch_add(1, Ordering::Relaxed)
    }

    pub(crate) fn add_peer(&self, peer: Rank, address: Address) {
        let mut peers = self.peers.lock().unwrap_or_else(PoisonError::into_inner);
        peers[peer.index()] = Some(Arc::new(address));
    }

    /// Returns the address of a connected peer.
    pub(crate) fn peer(&self, peer: Rank) -> Result<Arc<Address>, Error> {
        let peers = self.peers.lock().unwrap_or_else(PoisonError::into_inner);
        let found = peers.get(peer.index()).cloned().flatten();
        Ok(found.ok_or(Fault::NotConnected { peer })?)
    }

    /// Sends and receives what is possible now, for an engine. Returns whether something has
    /// happened.
    pub(crate) fn drive(&self, driver: &mut Driver) -> Result<bool, Error> {
        self.drives.fetch_add(1, Ordering::Relaxed);
        self.drive_worker(driver)
    }

    fn drive_worker(&self, driver: &mut Driver) -> Result<bool, Error> {
        let has_progressed = driver.worker()?.progress();
        driver.send_replies(|peer| self.peer(peer))?;
        let has_news = driver.worker()?.receiver().0.take_news();
        if has_news || has_progressed {
            self.sleepers.wake();
        }
        Ok(has_progressed || has_news)
    }

    /// Forgets a region whose memory is about to be freed.
    ///
    /// Memory of the fabric lives until its last request has ended. Memory of the caller must not
    /// be accessed any more, so this waits for such requests.
    pub(crate) fn forget(&self, number: u64, region: &Arc<Registration>) {
        let mut driver = self.lock();
        let Ok(worker) = driver.worker() else { return };
        worker.receiver().0.remove_region(number);
        if region.mapping.is_some() {
            return;
        }

        let limit = Instant::now() + DROP_TIMEOUT;
        while driver.uses(number, region) {
            if Instant::now() > limit || self.drive(&mut driver).is_err() {
                // The peer neither sends the rest nor closes the connection. Nothing but the end of
                // the worker keeps UCX from writing to the memory.
                driver.destroy();
                return;
            }
        }
    }

    /// Lets the thread of an engine sleep until the worker has events, if it has none now.
    pub(crate) fn sleep(&self, parker: &EventParker, limit: Duration) -> Result<(), Error> {
        self.asleep.fetch_add(1, Ordering::SeqCst);
        let slept = match self.arm() {
            Ok(true) => {
                parker.sleep([self.event_fd.as_fd()].into_iter(), limit).map_err(Error::from)
            }
            other => {
                parker.cancel_sleep();
                other.map(|_| 0)
            }
        };
        self.asleep.fetch_sub(1, Ordering::SeqCst);
        slept.map(drop)
    }

    /// Makes the descriptor of the worker report the next event. Returns false if there are events
    /// already.
    fn arm(&self) -> Result<bool, Error> {
        let mut driver = self.lock();
        Ok(!self.drive(&mut driver)? && driver.worker()?.arm()?)
    }

    /// Asks whether a peer is the rank that it was told of.
    pub(crate) fn hello(&self, to: &Address, deadline: Deadline) -> Result<(), Error> {
        // If both sides wait until the deadline of the group, no time is left to tell the others
        // which rank does not answer.
        let deadline = Deadline::after(deadline.remaining() * 3 / 4);
        let asked = self.ask_peer(to, Question::Hello, "answer", deadline);
        if !matches!(asked, Ok(Answer::Yes)) && self.peer(to.rank).is_err() {
            self.lock().forget_endpoint(to.rank);
        }
        match asked? {
            Answer::Yes => Ok(()),
            Answer::Freed | Answer::Unknown => {
                let how = format!(
                    "the process that answers at {} does not know the address of the rank: the rank has ended, or \
                     UCX has chosen a device that leads elsewhere; name the devices (UCX_NET_DEVICES)",
                    to.location()
                );
                Err(Fault::PeerLost { peer: to.rank, how }.into())
            }
        }
    }

    /// Asks the owner of a region whether it still exists.
    pub(crate) fn import(&self, to: &Address, key: &Key, deadline: Deadline) -> Result<(), Error> {
        let generation = key.generation().0;
        let question = Question::Exists { region: generation, bytes: key.bytes };
        match self.ask_peer(to, question, "answer whether its memory still exists", deadline)? {
            Answer::Yes => Ok(()),
            Answer::Freed | Answer::Unknown => {
                Err(Fault::Freed { peer: to.rank, generation }.into())
            }
        }
    }

    /// Asks a peer and waits for the answer; `what` completes the text "rank 1 did not ...".
    fn ask_peer(
        &self,
        to: &Address,
        question: Question,
        what: &'static str,
        deadline: Deadline,
    ) -> Result<Answer, Error> {
        let request = self.requests.fetch_add(1, Ordering::Relaxed);
        let header = Header {
            token: to.token,
            sender: self.rank,
            engine: 0,
            sequence: self.token,
            content: Content::Question { request, question },
        };

        self.lock().worker()?.receiver().0.open_question(request);
        let asked = self.lock().ask_peer(to, &header);
        let answer = asked.and_then(|()| self.wait_for_answer(to, request, what, deadline));
        if let Ok(worker) = self.lock().worker() {
            worker.receiver().0.close_question(request);
        }
        answer
    }

    fn wait_for_answer(
        &self,
        to: &Address,
        request: u64,
        what: &'static str,
        deadline: Deadline,
    ) -> Result<Answer, Error> {
        loop {
            let mut driver = self.lock();
            let has_progressed = self.drive(&mut driver)?;
            if let Some(answer) = driver.worker()?.receiver().0.answer(request) {
                return Ok(answer);
            }
            driver.check(to)?;
            if deadline.has_passed() {
                let what = format!(
                    "if rank {} at {} runs, a firewall or another route is between the hosts, so name the devices that \
                     reach it (UCX_NET_DEVICES): it did not {what}",
                    to.rank,
                    to.location()
                );
                return Err(Fault::Timeout { what, timeout: deadline.timeout() }.into());
            }

            let is_idle = !has_progressed && driver.worker()?.arm()?;
            drop(driver);
            if is_idle {
                self.sleep_until_event(&[], deadline.remaining().min(ANSWER_SLEEP_MAX));
            }
        }
    }

    /// Sleeps until the worker has events or one of the other descriptors is readable.
    fn sleep_until_event(&self, others: &[BorrowedFd<'_>], limit: Duration) {
        let fds = [self.event_fd.as_fd()].into_iter().chain(others.iter().copied());
        let mut fds: Vec<_> = fds.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)).collect();
        let limit = Timespec {
            tv_sec: i64::try_from(limit.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: limit.subsec_nanos().into(),
        };
        // Woken, interrupted or timed out: the caller looks in every case.
        let _ = poll(&mut fds, Some(&limit));
    }
}
