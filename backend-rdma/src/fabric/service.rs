//! The service thread: answers the requests of peers and handles events of the device.
//!
//! It owns the passive ends of the peers' queue pairs. They live as long as the connection that requested them.

use std::io::{Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::Wake;
use std::thread::JoinHandle;
use std::time::Duration;

use ibverbs_sys::ibv_event_type;
use peerlane_hal::{Rank, RemoteKey as _};
use rustix::event::{PollFd, PollFlags, poll};

use super::alarm::Alarm;
use super::control::framed;
use super::ends::{self, End};
use super::question::{Answer, MESSAGE_BYTES_MAX, Opening, Question};
use super::{Inner, SignalBy};
use crate::error::Error;
use crate::memory;
use crate::sys::{Qp, QpSizes};

/// The timeout for sending a response.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(2);

/// A handle that keeps the service thread running.
#[derive(Debug)]
pub(super) struct Service {
    pub(super) at: SocketAddr,
    stop: Arc<Alarm>,
    stopped: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Service {
    /// Starts the thread and listens at a free port of `ip`.
    pub(super) fn start(inner: &Arc<Inner>, ip: IpAddr) -> Result<Self, Error> {
        let any: IpAddr = match ip {
            IpAddr::V4(_) => [0; 4].into(),
            IpAddr::V6(_) => [0; 16].into(),
        };
        let listener = TcpListener::bind((any, 0)).map_err(Error::io("listen for peers"))?;
        listener.set_nonblocking(true).map_err(Error::io("listen for peers"))?;
        let port = listener.local_addr().map_err(Error::io("listen for peers"))?.port();
        let stop = Alarm::new()?;
        stop.announce(true);
        let stopped = Arc::new(AtomicBool::new(false));
        let mut server = Server {
            inner: Arc::clone(inner),
            listener,
            askers: Vec::new(),
            stop: Arc::clone(&stop),
            stopped: Arc::clone(&stopped),
        };
        let thread = std::thread::Builder::new()
            .name("peerlane-rdma".to_owned())
            .spawn(move || server.run())
            .map_err(Error::io("start the thread that answers peers"))?;
        Ok(Self { at: SocketAddr::new(ip, port), stop, stopped, thread: Some(thread) })
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        self.stopped.store(true, Ordering::SeqCst);
        self.stop.wake_by_ref();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

struct Server {
    inner: Arc<Inner>,
    listener: TcpListener,
    askers: Vec<Asker>,
    stop: Arc<Alarm>,
    stopped: Arc<AtomicBool>,
}

/// A connection of a peer, with the queue pairs that it has opened.
struct Asker {
    stream: TcpStream,
    bytes: Vec<u8>,
    /// The rank of the peer, after it has sent the token.
    rank: Option<Rank>,
    pairs: Vec<Passive>,
}

/// The passive end of a peer engine's queue pair.
struct Passive {
    qp: Qp,
    card: usize,
    /// The number of the primary queue pair, which can be this one.
    lead: u32,
}

impl Server {
    fn run(&mut self) {
        while !self.stopped.load(Ordering::SeqCst) {
            let Ok(ready) = self.sleep() else { return };
            for card in ready.cards {
                self.hear(card);
            }
            if ready.listener {
                self.accept();
            }
            for index in ready.askers.into_iter().rev() {
                if self.answer_all(index).is_err() {
                    let asker = self.askers.swap_remove(index);
                    close(&self.inner, asker.pairs);
                }
            }
        }
    }

    fn sleep(&self) -> rustix::io::Result<Ready> {
        let cards = self.inner.cards.iter().map(|card| {
            // SAFETY: the context is open as long as `inner`.
            unsafe { BorrowedFd::borrow_raw(card.place.context.event_fd()) }
        });
        let askers = self.askers.iter().map(|asker| asker.stream.as_fd());
        let mut fds: Vec<PollFd<'_>> = [self.stop.fd(), self.listener.as_fd()]
            .into_iter()
            .chain(cards)
            .chain(askers)
            .map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN))
            .collect();
        match poll(&mut fds, None) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(errno) => return Err(errno),
        }
        let is_ready: Vec<bool> = fds.iter().map(|fd| !fd.revents().is_empty()).collect();
        let (cards, askers) = is_ready[2..].split_at(self.inner.cards.len());
        let places = |ready: &[bool]| (0..ready.len()).filter(|index| ready[*index]).collect();
        Ok(Ready { listener: is_ready[1], cards: places(cards), askers: places(askers) })
    }

    /// Handles the events of a NIC.
    fn hear(&self, card: usize) {
        let Ok((event, text)) = self.inner.cards[card].place.context.event() else { return };
        match event {
            ibv_event_type::DEVICE_FATAL | ibv_event_type::CQ_ERR | ibv_event_type::SRQ_ERR => {
                self.inner.lose_device(card, text);
            }
            // Nobody polls at present, and peers go on sending.
            ibv_event_type::SRQ_LIMIT_REACHED => {
                // First: were all places taken in between, no message could come that tells.
                self.inner.cards[card].warn_when_low();
                // What fails here fails again where somebody hears of it.
                let _ = self.inner.arrivals.take();
            }
            ibv_event_type::PORT_ERR => self.inner.cards[card].set_down(true),
            ibv_event_type::PORT_ACTIVE => self.inner.cards[card].set_down(false),
            _ => {}
        }
    }

    fn accept(&mut self) {
        let Ok((stream, _)) = self.listener.accept() else { return };
        let ready = stream
            .set_nonblocking(false)
            .and_then(|()| stream.set_nodelay(true))
            .and_then(|()| stream.set_write_timeout(Some(ANSWER_TIMEOUT)));
        if ready.is_ok() {
            self.askers.push(Asker { stream, bytes: Vec::new(), rank: None, pairs: Vec::new() });
        }
    }

    /// Reads from a connection and answers complete requests. An error ends the connection.
    fn answer_all(&mut self, index: usize) -> std::io::Result<()> {
        let asker = &mut self.askers[index];
        let mut buffer = [0; 4096];
        let count = asker.stream.read(&mut buffer)?;
        if count == 0 {
            return Err(std::io::ErrorKind::UnexpectedEof.into());
        }
        asker.bytes.extend_from_slice(&buffer[..count]);
        while let Some(question) = asker.question()? {
            let answer = asker.answer(&self.inner, &question);
            asker.stream.write_all(&framed(&answer.encode()))?;
        }
        Ok(())
    }
}

struct Ready {
    listener: bool,
    cards: Vec<usize>,
    askers: Vec<usize>,
}

impl Asker {
    /// Returns the next complete request.
    fn question(&mut self) -> std::io::Result<Option<Question>> {
        let Some((length, rest)) = self.bytes.split_first_chunk::<4>() else { return Ok(None) };
        let length = u32::from_le_bytes(*length) as usize;
        if length > MESSAGE_BYTES_MAX {
            return Err(std::io::Error::other("no question is so long"));
        }
        let Some(question) = rest.get(..length) else { return Ok(None) };
        let question = Question::decode(question).map_err(std::io::Error::other)?;
        self.bytes.drain(..4 + length);
        Ok(Some(question))
    }

    fn answer(&mut self, inner: &Arc<Inner>, question: &Question) -> Answer {
        match (*question, self.rank) {
            (Question::Hello { token, rank, ranks }, _) => {
                if token != inner.token {
                    return Answer::Refused(
                        "the address is of a fabric that was closed there".to_owned(),
                    );
                }
                if ranks as usize != inner.ranks {
                    let wanted = inner.ranks;
                    return Answer::Refused(format!("it was opened for {wanted} ranks"));
                }
                self.rank = Some(rank);
                Answer::Yes
            }
            (_, None) => Answer::Refused("it wants the token first".to_owned()),
            (Question::Import(key), _) => {
                let known = key.rank == inner.rank && memory::find(&key).is_some();
                let known = known && key.region_bytes() == key.bytes;
                if known { Answer::Yes } else { Answer::Freed }
            }
            (Question::Open(opening), _) => match self.open(inner, &opening) {
                Ok((end, signal)) => Answer::Opened { end, signal },
                Err(error) => Answer::Refused(error.to_string()),
            },
            (Question::Close { lead }, _) => {
                close(inner, self.pairs.extract_if(.., |pair| pair.lead == lead).collect());
                Answer::Yes
            }
        }
    }

    fn open(&mut self, inner: &Inner, opening: &Opening) -> Result<(End, SignalBy), Error> {
        let Opening { end: other, strand, card: number, signal } = opening;
        let (number, arrivals) = (usize::from(*number), &inner.arrivals);
        let card = inner.cards.get(number).ok_or_else(|| {
            Error::argument(format!("there is no card {number}, there are {}", inner.cards.len()))
        })?;
        if strand.lead.is_some_and(|lead| !self.pairs.iter().any(|open| open.lead == lead)) {
            return Err(Error::argument(format!("there is no stream for {strand:?}")));
        }
        let sizes = QpSizes { sends: 1, inline_bytes: 0 };
        let qp = Qp::create(&card.domain, &card.cq, Some(&card.srq), sizes)?;
        let own = End::of(&qp, &card.place)?;
        // Before anything can come.
        arrivals.open((number, qp.number()), *strand);
        let lead = strand.lead.unwrap_or(qp.number());
        let passive = Passive { qp, card: number, lead };
        if let Err(error) =
            ends::receive_from(&passive.qp, &card.place, &inner.options, &own, other)
        {
            close(inner, vec![passive]);
            return Err(error);
        }
        let signal = signal.unwrap_or_else(|| {
            if passive.qp.writes_in_order() { SignalBy::Write } else { SignalBy::Message }
        });
        let signal = match signal {
            SignalBy::Write if !arrivals.allow_writes() => SignalBy::Message,
            signal => signal,
        };
        self.pairs.push(passive);
        Ok((own, signal))
    }
}

/// Closes passive ends after taking what has arrived on them, because destroying a queue pair may discard it.
fn close(inner: &Inner, pairs: Vec<Passive>) {
    pairs.iter().for_each(|pair| pair.qp.fail());
    inner.arrivals.close(pairs.iter().map(|pair| (pair.card, pair.qp.number())));
}
