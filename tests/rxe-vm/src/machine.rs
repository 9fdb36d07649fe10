//! Runs QEMU with the guest's console as its standard output.

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, Stdio};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::{Duration, Instant};

use crate::console::{Console, End};
use crate::emulator::Emulator;
use crate::kernel::Kernel;
use crate::process::{self, Outcome};

/// The kernel's command line.
///
/// An oops panics, so that it cannot pass for a failing test. The clock counts as reliable: on a busy machine the
/// kernel would otherwise replace it and patch its code while tests run, which the emulator does not survive. Memory
/// is not cleared when it is allocated, as Debian's kernels do by default, because that takes longer under emulation
/// than using the memory.
const COMMAND_LINE: &str = "console=ttyS0 quiet loglevel=4 panic=-1 oops=panic mitigations=off nokaslr \
     random.trust_cpu=on tsc=reliable init_on_alloc=0";
/// The time over which the frequency of the time stamp counter is measured.
#[cfg(target_arch = "x86_64")]
const COUNTED: Duration = Duration::from_millis(100);
/// The longest time between a look at the clock and one at the counter.
#[cfg(target_arch = "x86_64")]
const BESIDE: Duration = Duration::from_micros(20);
/// The emulated processor. Without these two flags, the kernel and the C library do not use string instructions,
/// which the emulator executes byte by byte.
const EMULATED: &str = "max,-erms,-fsrm";
/// Memory in addition to the image's.
const MEMORY_MIB: u64 = 1024;

/// Boots the guest and copies its console to standard output until it ends.
pub(crate) fn boot(emulator: &Emulator, kernel: &Kernel, image: &Path) -> Outcome<(Console, End)> {
    let image_mib = fs::metadata(image)?.len() >> 20;
    let processors = std::thread::available_parallelism()?.get().clamp(2, 4);
    let mut qemu = emulator.command();
    qemu.args(["-M", "pc,usb=off", "-smp", &processors.to_string()]);
    let mut command_line = COMMAND_LINE.to_owned();
    if hardware() {
        qemu.args(["-cpu", "max", "-accel", "kvm"]);
    } else {
        qemu.args(["-cpu", EMULATED]);
        // The emulator passes the counter of this processor on. On a busy machine the kernel measures it wrongly, and
        // its clock then runs several times too fast.
        if let Some(khz) = tsc_khz() {
            command_line.push_str(&format!(" tsc_early_khz={khz}"));
        }
    }
    qemu.args(["-accel", "tcg,thread=multi"]);
    // The packed image, its files, and room for both at once.
    qemu.args(["-m", &(MEMORY_MIB + 2 * image_mib).to_string()]);
    qemu.args(["-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"]);
    qemu.args(["-serial", "stdio", "-append", &command_line]);
    qemu.arg("-kernel").arg(&kernel.image).arg("-initrd").arg(image);
    let child = qemu
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .map_err(|error| format!("{}: {error}", process::line(&qemu)))?;
    follow(Running(child), std::io::stdout())
}

/// Returns whether KVM is available.
fn hardware() -> bool {
    let flags = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let able = flags.split_whitespace().any(|flag| flag == "vmx" || flag == "svm");
    able && fs::OpenOptions::new().read(true).write(true).open("/dev/kvm").is_ok()
}

/// Returns the frequency in kHz of this processor's time stamp counter, if it has one.
#[cfg(target_arch = "x86_64")]
fn tsc_khz() -> Option<u64> {
    // The scheduler may take this thread away between the two looks; then it looks again.
    let look = || loop {
        let before = Instant::now();
        // SAFETY: every x86-64 processor has the instruction, and Linux permits it to programs.
        let ticks = unsafe { std::arch::x86_64::_rdtsc() };
        if before.elapsed() < BESIDE {
            return (ticks, before);
        }
    };
    let (first, begun) = look();
    std::thread::sleep(COUNTED);
    let (last, ended) = look();
    let micros = u64::try_from((ended - begun).as_micros()).ok()?;
    Some(last.checked_sub(first)?.checked_mul(1000)? / micros)
}

#[cfg(not(target_arch = "x86_64"))]
fn tsc_khz() -> Option<u64> {
    None
}

/// Kills the process when it is dropped.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn follow(mut machine: Running, mut out: impl Write) -> Outcome<(Console, End)> {
    let printed = machine.0.stdout.take().expect("standard output is piped");
    let (sender, lines) = mpsc::channel();
    std::thread::spawn(move || {
        for line in BufReader::new(printed).split(b'\n') {
            let Ok(line) = line else { return };
            let text = String::from_utf8_lossy(&line).trim_end_matches('\r').to_owned();
            if sender.send(text).is_err() {
                return;
            }
        }
    });
    let mut console = Console::default();
    let mut deadline = Instant::now() + console.patience();
    let mut end = End::Exited;
    loop {
        match lines.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
            Ok(line) => {
                writeln!(out, "{line}")?;
                if console.line(&line) {
                    deadline = Instant::now() + console.patience();
                }
            }
            Err(RecvTimeoutError::Disconnected) => return Ok((console, end)),
            Err(RecvTimeoutError::Timeout) => {
                if end == End::Silent {
                    return Ok((console, end));
                }
                // The end of the process closes the console, after the rest of a line.
                end = End::Silent;
                machine.0.kill()?;
                deadline = Instant::now() + Duration::from_secs(5);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    #[test]
    fn the_frequency_of_the_counter_is_stable() {
        let Some(first) = tsc_khz() else { return };
        let second = tsc_khz().unwrap();
        assert!(first.abs_diff(second) < first / 100, "{first} and then {second} kHz");
    }

    #[test]
    fn the_console_is_passed_on_to_its_end() {
        let mut command = Command::new("printf");
        let child =
            command.arg("one\r\n##peerlane ready\r\n##peerlane done").stdout(Stdio::piped());
        let mut out = Vec::new();
        let (console, end) = follow(Running(child.spawn().unwrap()), &mut out).unwrap();
        assert_eq!(String::from_utf8(out).unwrap(), "one\n##peerlane ready\n##peerlane done\n");
        assert_eq!(console.verdict(end, 0), Ok(()));
    }
}
