//! Tests the stopwatch beside twice as many busy loops as there are processors.

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::channel;
use std::thread;
use std::time::Duration;

use peerlane_test_support::{Elapsed, Stopwatch};

/// Processes that never wait; killed when dropped.
struct BusyLoops(Vec<Child>);

impl BusyLoops {
    fn start() -> Self {
        let count = 2 * thread::available_parallelism().unwrap().get();
        let start = |_| shell("while :; do :; done");
        Self((0..count).map(start).collect())
    }
}

impl Drop for BusyLoops {
    fn drop(&mut self) {
        for process in &mut self.0 {
            process.kill().unwrap();
            process.wait().unwrap();
        }
    }
}

fn shell(program: &str) -> Child {
    let mut command = Command::new("sh");
    command.args(["-c", program]).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap()
}

/// Returns how long a thread has run on a processor.
fn time_on_processor(thread: &str) -> Duration {
    let text = fs::read_to_string(format!("/proc/{thread}/schedstat")).unwrap();
    Duration::from_nanos(text.split(' ').next().unwrap().parse().unwrap())
}

/// Keeps a processor busy for 200 ms, and returns the time of it that was used.
fn work() -> Duration {
    let before = time_on_processor("thread-self");
    loop {
        let used = time_on_processor("thread-self") - before;
        if used >= Duration::from_millis(200) {
            return used;
        }
    }
}

/// Runs `measure` beside busy loops, and compares the net time of both that it returns with the other one.
#[track_caller]
fn expect_equal(measure: impl FnOnce() -> (Elapsed, Duration)) {
    let busy = BusyLoops::start();
    let (took, expected) = measure();
    drop(busy);

    // What the host of a virtual machine has taken is in one part of the figures or in the other, by kernel.
    let [shortest, longest] = [took.net(), took.total.saturating_sub(took.waited)];
    let is_equal = shortest < expected * 5 / 4 && longest > expected * 3 / 4;
    assert!(is_equal, "expected {expected:?}: {took}");
    println!("expected {expected:?}: {took}");
}

/// One test, because the waits of other threads of this process are subtracted, too.
#[test]
fn the_net_time_holds_work_and_sleep_but_no_waits_for_processors() {
    // A thread that works.
    expect_equal(|| {
        let watch = Stopwatch::start();
        let used = work();
        (watch.elapsed(), used)
    });

    // A thread that sleeps.
    expect_equal(|| {
        let watch = Stopwatch::start();
        let length = Duration::from_millis(100);
        thread::sleep(length);
        (watch.elapsed(), length)
    });

    // A thread that begins and ends meanwhile. It ends after a look, which is what counts its waits. The time in which it ends is
    // not part of the measurement.
    expect_equal(|| {
        let watch = Stopwatch::start();
        let (done, is_done) = channel();
        let (end, may_end) = channel::<()>();
        let thread = thread::spawn(move || {
            done.send(work()).unwrap();
            let _ = may_end.recv();
        });
        let used = is_done.recv().unwrap();
        let before = watch.elapsed();
        drop(end);
        thread.join().unwrap();
        let after = watch.elapsed();
        assert!(after.waited >= before.waited, "{before}, then {after}");
        (before, used)
    });

    // A thread of another test, whose waits are not subtracted.
    expect_equal(|| {
        let watch = Stopwatch::start();
        let other = thread::Builder::new().name("another test".to_owned()).spawn(work).unwrap();
        other.join().unwrap();
        let took = watch.elapsed();
        (took, took.total)
    });

    // Another process.
    expect_equal(|| {
        let count = "i=0; while [ $i -lt 200000 ]; do i=$((i+1)); done";
        let mut process = shell(&format!("read line; {count}; echo done; read line"));
        let (mut input, output) = (process.stdin.take().unwrap(), process.stdout.take().unwrap());

        let watch = Stopwatch::start_with([process.id()]);
        writeln!(input).unwrap();
        BufReader::new(output).read_line(&mut String::new()).unwrap();
        let took = watch.elapsed();

        let used = time_on_processor(&process.id().to_string());
        drop(input);
        process.wait().unwrap();
        (took, used)
    });
}
