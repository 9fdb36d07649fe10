//! Interrupts the threads of two ranks with signals, such as those of a profiler, through the whole life of groups.
//!
//! A signal whose handler was installed without `SA_RESTART` interrupts every system call that waits. Calls with a
//! timeout are interrupted even with `SA_RESTART`.

use std::fmt::Debug;
use std::io::{ErrorKind, Read, Write};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use peerlane_collectives::bootstrap::environment::Environment;
use peerlane_collectives::bootstrap::tcp::{Hub, TcpBootstrap};
use peerlane_collectives::error::Error;
use peerlane_collectives::group::Group;
use peerlane_hal::{BackendId, Deadline, Generation, Rank, Role};
use peerlane_host as host;
use peerlane_test_support::Stopwatch;
use peerlane_tests::processes::{Child, Parent};
use peerlane_toolkit::DeadlineSocket;
use peerlane_toolkit::handover::{Claim, ProcessToken, Refusal, ask};

const RANKS: usize = 2;
/// The groups that the ranks open one after the other.
const GROUPS: usize = 3;
/// How often the ranks repeat every call of a group.
const ROUNDS: usize = 6;
/// The pause between two rounds of signals.
const PAUSE: Duration = Duration::from_micros(300);
/// Larger than what the buffer of a socket takes at once.
const EXCHANGED_BYTES: usize = 300_000;
const SIGNAL: libc::c_int = libc::SIGPROF;

fn soon() -> Deadline {
    Deadline::after(Duration::from_secs(20))
}

static HANDLED: AtomicU64 = AtomicU64::new(0);

extern "C" fn count(_: libc::c_int) {
    HANDLED.fetch_add(1, Ordering::Relaxed);
}

fn install_handler(flags: libc::c_int) {
    // SAFETY: all fields of the structure are numbers or optional pointers, which may be zero.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    action.sa_sigaction = count as extern "C" fn(libc::c_int) as libc::sighandler_t;
    action.sa_flags = flags;
    // SAFETY: the handler only adds to an atomic number, which a handler may do.
    let code = unsafe { libc::sigaction(SIGNAL, &action, std::ptr::null_mut()) };
    assert_eq!(code, 0, "{}", std::io::Error::last_os_error());
}

/// Interrupts the threads of this process until it is dropped.
struct Interrupts {
    stop: Arc<AtomicBool>,
    sender: Option<JoinHandle<()>>,
}

impl Interrupts {
    fn start(flags: libc::c_int, until: Deadline) -> Self {
        install_handler(flags);
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let sender = Some(std::thread::spawn(move || interrupt_threads(&stopped, until)));
        Self { stop, sender }
    }
}

impl Drop for Interrupts {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        // A failed sender has printed why.
        let _ = self.sender.take().map(JoinHandle::join);
    }
}

/// Sends the signal to every other thread of this process again and again, until `stop` is set or `until` has passed.
fn interrupt_threads(stop: &AtomicBool, until: Deadline) {
    let process = std::process::id();
    // SAFETY: the call has no arguments.
    let own = unsafe { libc::gettid() };
    while !stop.load(Ordering::Relaxed) && !until.has_passed() {
        let entries = std::fs::read_dir("/proc/self/task").unwrap().flatten();
        let threads = entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
        for thread in threads.filter(|thread: &libc::pid_t| *thread != own) {
            // SAFETY: the arguments are numbers. A thread that has just ended is an error without effect.
            let _ = unsafe { libc::syscall(libc::SYS_tgkill, process, thread, SIGNAL) };
        }
        std::thread::sleep(PAUSE);
    }
}

/// Opens a group, makes every kind of call that waits for the other rank or asks the system, and closes the group.
fn live(bootstrap: TcpBootstrap, rank: Rank) -> Result<(), (&'static str, Error)> {
    let fabric = host::Fabric::open(rank, RANKS).unwrap();
    let mut group = Group::open(bootstrap, fabric).map_err(|error| ("open", error))?;
    for _ in 0..ROUNDS {
        let mut gather =
            group.all_gather::<f32>(256).prepare().map_err(|error| ("prepare", error))?;
        gather.run().map_err(|error| ("run", error))?;
        gather.start().and_then(|started| started.wait()).map_err(|error| ("start", error))?;
        drop(gather);

        let exchanged = group.exchange(&vec![rank.0 as u8; EXCHANGED_BYTES]);
        exchanged.map_err(|error| ("exchange", error))?;

        let split = group.split(Some(0), 0).map_err(|error| ("split", error))?;
        let mut split = split.expect("every rank has a color");
        split.barrier().map_err(|error| ("split barrier", error))?;
        split.close().map_err(|error| ("split close", error))?;

        let window = group.window::<u8>(1 << 20).map_err(|error| ("window", error))?;
        group.release(window).map_err(|unreleased| ("release", unreleased.error))?;
    }
    group.close().map_err(|error| ("close", error))
}

/// Binds the hubs of all groups on rank 0, and returns them with their addresses.
fn hubs(parent: &Parent, rank: Rank) -> (Vec<Option<Hub>>, Vec<String>) {
    if rank == Rank(0) {
        let hubs: Vec<Hub> =
            (0..GROUPS).map(|_| Hub::bind("127.0.0.1:0", RANKS).unwrap()).collect();
        let addresses: Vec<_> = hubs.iter().map(|hub| hub.address().to_string()).collect();
        // The harness has begun a line.
        parent.print_line("");
        parent.print_line(format_args!("hubs {}", addresses.join(" ")));
        return (hubs.into_iter().map(Some).collect(), addresses);
    }
    let addresses = parent.read_line().unwrap();
    ((0..GROUPS).map(|_| None).collect(), addresses.split(' ').map(str::to_owned).collect())
}

#[test]
#[ignore = "started by the other tests of this program"]
fn rank_of_a_test() {
    let parent = Parent::find().expect("started by a test");
    let rank = Rank(parent.value("RANK").unwrap());
    let interrupts = Interrupts::start(parent.value("FLAGS").unwrap(), soon());

    let (hubs, addresses) = hubs(&parent, rank);
    let mut failed = None;
    for (hub, address) in hubs.into_iter().zip(addresses) {
        let joined = match hub {
            Some(hub) => TcpBootstrap::join_with_hub(hub, soon()),
            None => TcpBootstrap::join(&Environment::at_hub(address, rank, RANKS), soon()),
        };
        let lived = joined.map_err(|error| ("join", error)).and_then(|it| live(it, rank));
        if let Err((call, error)) = lived {
            failed = Some(format!("{call}: {error}"));
            break;
        }
    }

    drop(interrupts);
    let handled = HANDLED.load(Ordering::Relaxed);
    parent.print_line("");
    parent.print_line(format_args!(
        "result {}",
        failed.unwrap_or_else(|| format!("{handled} signals"))
    ));
}

fn start(rank: usize, flags: libc::c_int) -> Child {
    let mut command = Command::new(std::env::current_exe().unwrap());
    let test = "rank_of_a_test";
    command.args(["--ignored", "--exact", test, "--nocapture", "--test-threads=1"]);
    command.env("PEERLANE_TEST_ROLE", test);
    command.env("PEERLANE_TEST_RANK", rank.to_string());
    command.env("PEERLANE_TEST_FLAGS", flags.to_string());
    Child::spawn(test, command).unwrap()
}

/// Returns the rest of the next line that begins with `word`.
fn next(child: &mut Child, word: &str) -> String {
    loop {
        let line = child.read_line(soon()).unwrap();
        if let Some(rest) = line.strip_prefix(word) {
            return rest.trim().to_owned();
        }
    }
}

fn run_ranks(flags: libc::c_int) {
    let mut ranks: Vec<_> = (0..RANKS).map(|rank| start(rank, flags)).collect();
    let addresses = next(&mut ranks[0], "hubs");
    ranks[1].send_line(addresses).unwrap();
    let results: Vec<_> = ranks.iter_mut().map(|rank| next(rank, "result")).collect();
    for result in &results {
        let handled = result.strip_suffix(" signals").and_then(|text| text.parse().ok());
        assert!(handled.is_some_and(|handled: u64| handled > 100), "{results:?}");
    }
}

#[test]
fn signals_that_interrupt_calls_reach_no_user() {
    run_ranks(0);
}

#[test]
fn signals_that_restart_calls_reach_no_user() {
    run_ranks(libc::SA_RESTART);
}

const WAIT: Duration = Duration::from_millis(100);
/// How long a call with this deadline may wait, apart from waits for a processor.
const WAIT_MAX: Duration = Duration::from_millis(600);
/// How long it may wait on any machine. It returns before the signals end, so waits for a processor cannot hide a wait that
/// every signal begins anew.
const WAIT_TOTAL_MAX: Duration = Duration::from_millis(3500);
/// The time after which the signals end, so that a wait that every signal begins anew ends too, and is a failure.
const SIGNALS: Duration = Duration::from_secs(4);

/// Interrupts this thread once, after a time, also if the thread that interrupts all others does not run for so long.
struct Interrupt(libc::timer_t);

impl Interrupt {
    fn after(time: Duration) -> Self {
        // SAFETY: all fields of the structures are numbers or optional pointers, which may be zero.
        let (mut event, mut at): (libc::sigevent, libc::itimerspec) = unsafe { std::mem::zeroed() };
        event.sigev_notify = libc::SIGEV_THREAD_ID;
        event.sigev_signo = SIGNAL;
        // SAFETY: the call has no arguments.
        event.sigev_notify_thread_id = unsafe { libc::gettid() };
        at.it_value.tv_nsec = time.subsec_nanos().into();

        let mut timer = std::ptr::null_mut();
        // SAFETY: the arguments are references to structures of this function.
        let code =
            unsafe { libc::timer_create(libc::CLOCK_MONOTONIC, &raw mut event, &raw mut timer) };
        assert_eq!(code, 0, "{}", std::io::Error::last_os_error());
        // SAFETY: the timer has just been made, and its former time is not wanted.
        let code = unsafe { libc::timer_settime(timer, 0, &raw const at, std::ptr::null_mut()) };
        assert_eq!(code, 0, "{}", std::io::Error::last_os_error());
        Self(timer)
    }
}

impl Drop for Interrupt {
    fn drop(&mut self) {
        // SAFETY: the timer is this one's.
        unsafe { libc::timer_delete(self.0) };
    }
}

/// Makes a call that waits until its deadline while signals interrupt it, and returns its error.
fn wait_interrupted<T: Debug, E>(call: impl FnOnce(Deadline) -> Result<T, E>) -> E {
    let _interrupts = Interrupts::start(0, Deadline::after(SIGNALS));
    let watch = Stopwatch::start();
    let before = HANDLED.load(Ordering::Relaxed);
    let _interrupt = Interrupt::after(WAIT / 2);
    let Err(error) = call(Deadline::after(WAIT)) else { panic!("the call must not succeed") };
    let took = watch.elapsed();
    assert!(took.total >= WAIT, "the call took {took}, its timeout is {WAIT:?}");
    assert!(took.net() < WAIT_MAX, "the call took {took}, expected {WAIT_MAX:?}");
    assert!(
        took.total < WAIT_TOTAL_MAX,
        "the call took {took}, expected {WAIT_TOTAL_MAX:?} in all"
    );
    let handled = HANDLED.load(Ordering::Relaxed) - before;
    assert!(handled > 0, "no signal was handled");
    error
}

fn is_timeout(error: &std::io::Error) -> bool {
    matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut)
}

#[test]
fn an_interrupted_read_ends_at_its_deadline() {
    let (here, mut there) = UnixStream::pair().unwrap();
    there.write_all(&[1, 2, 3]).unwrap();
    let error = wait_interrupted(|deadline| {
        // Three of four bytes are here.
        DeadlineSocket::new(&here, deadline).read_exact(&mut [0; 4])
    });
    assert!(is_timeout(&error), "{error}");
}

#[test]
fn an_interrupted_write_ends_at_its_deadline() {
    let (here, _there) = UnixStream::pair().unwrap();
    // More than the buffer of the socket takes.
    let bytes = vec![0; 16 << 20];
    let error = wait_interrupted(|deadline| DeadlineSocket::new(&here, deadline).write_all(&bytes));
    assert!(is_timeout(&error), "{error}");
}

#[test]
fn an_interrupted_request_for_memory_ends_at_its_deadline() {
    // A name that the test has for itself, also beside another run of it.
    let mut token = *b"sile____ process";
    token[4..8].copy_from_slice(&std::process::id().to_be_bytes());
    let name =
        token[..8].iter().fold("peerlane-".to_owned(), |name, byte| format!("{name}{byte:02x}"));
    let token = ProcessToken(token);
    // Connections are established, and no thread answers them.
    let address = SocketAddr::from_abstract_name(name).unwrap();
    let _listener = UnixListener::bind_addr(&address).unwrap();
    let claim = Claim {
        backend: BackendId::HOST,
        generation: Generation(1),
        owner: Rank(1),
        role: Role::Data,
    };
    let refusal = wait_interrupted(|deadline| ask(token, &claim, deadline));
    assert_eq!(refusal, Refusal::Late { timeout: WAIT });
}
