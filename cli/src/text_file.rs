//! Opens the files that command line options name, for reading and for writing.

use std::fs::{File, OpenOptions};
use std::io::{self, Read as _, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;
use std::time::Duration;

use peerlane::Deadline;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};

use crate::error::{Failure, Result};
use crate::printable::file_name;
use crate::units::Size;

/// The maximum length of a text file in bytes.
const TEXT_BYTES_MAX: u64 = 256 << 20;

/// How long a read waits for the next bytes of a pipe, such as one that no process writes to.
const PIPE_TIMEOUT: Duration = Duration::from_secs(10);

/// Reads a text file of at most 256 MiB.
pub(crate) fn read(path: &Path) -> Result<String> {
    read_within(path, PIPE_TIMEOUT)
}

fn read_within(path: &Path, timeout: Duration) -> Result<String> {
    let what = file_name(path);
    let failed = |error: io::Error| Failure::io(format_args!("cannot read {what}"), &error);

    // Without this flag, the open of a named pipe waits for a writer.
    let file = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(path);
    let file = file.map_err(failed)?;
    let metadata = file.metadata().map_err(failed)?;
    let too_long = || {
        let max = Size(TEXT_BYTES_MAX);
        Failure::usage(format!(
            "{what} has more than {max}, expected a text file that `peerlane` wrote"
        ))
    };
    if metadata.len() > TEXT_BYTES_MAX {
        return Err(too_long());
    }

    // A pipe that no process has opened for writing reads as empty, so its first bytes are waited for.
    let mut bytes = Vec::new();
    let mut limited = (&file).take(TEXT_BYTES_MAX + 1);
    let mut is_ready = metadata.is_file() || wait_until_readable(&file, timeout).map_err(failed)?;
    while is_ready {
        match limited.read_to_end(&mut bytes) {
            Ok(_) => break,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                is_ready = wait_until_readable(&file, timeout).map_err(failed)?;
            }
            Err(error) => return Err(failed(error)),
        }
    }
    if !is_ready {
        return Err(Failure::failed(format!(
            "cannot read {what}: nothing was written to it for {timeout:?}, expected a text file"
        )));
    }

    if bytes.len() as u64 > TEXT_BYTES_MAX {
        return Err(too_long());
    }
    String::from_utf8(bytes).map_err(|error| {
        let at = error.utf8_error().valid_up_to();
        Failure::failed(format!("cannot read {what}: byte {at} is not UTF-8, expected a text file"))
    })
}

/// Returns whether a read of the file does not block, after at most `timeout`.
fn wait_until_readable(file: &File, timeout: Duration) -> io::Result<bool> {
    let deadline = Deadline::after(timeout);
    let events = deadline.retry_interrupted(|left| {
        let left = Timespec::try_from(left).ok();
        Ok(poll(&mut [PollFd::new(file, PollFlags::IN)], left.as_ref())?)
    })?;
    Ok(events > 0)
}

/// Creates a file, or empties an existing one.
///
/// # Errors
/// That of the system, also for a named pipe from which no process reads.
pub(crate) fn create(path: &Path) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.write(true).create(true).truncate(true).custom_flags(libc::O_NONBLOCK);
    let file = options.open(path)?;

    // Only the open must not wait. A reader of a pipe or a terminal that is slow is waited for.
    let flags = fcntl_getfl(&file)?;
    fcntl_setfl(&file, flags - OFlags::NONBLOCK)?;
    Ok(file)
}

/// Writes a whole file, as [`create`] opens it.
pub(crate) fn write(path: &Path, content: &str) -> io::Result<()> {
    create(path)?.write_all(content.as_bytes())
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;
    use std::thread;

    use rustix::fs::{CWD, FileType, Mode, mknodat};

    use super::*;

    /// Creates a named pipe in a folder of the test with this name.
    fn pipe(test: &str) -> PathBuf {
        let folder = std::env::temp_dir().join(format!("peerlane-{test}-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let path = folder.join("pipe.svg");
        mknodat(CWD, &path, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
        path
    }

    fn remove(pipe: &Path) {
        std::fs::remove_dir_all(pipe.parent().unwrap()).unwrap();
    }

    #[test]
    fn a_pipe_without_a_writer_is_an_error_within_the_timeout() {
        let path = pipe("no-writer");
        let error = read_within(&path, Duration::from_millis(10)).unwrap_err();
        let expected = format!(
            "cannot read {}: nothing was written to it for 10ms, expected a text file",
            path.display()
        );
        assert_eq!(error.text(), expected);
        remove(&path);
    }

    #[test]
    fn a_pipe_is_read_to_its_end() {
        let path = pipe("writer");
        let long = "x".repeat(300_000);
        let text = thread::scope(|scope| {
            // The open of the writer waits for the reader.
            scope.spawn(|| std::fs::write(&path, &long).unwrap());
            read(&path).unwrap()
        });
        assert_eq!(text, long);
        remove(&path);
    }

    #[test]
    fn writes_to_devices_wait_for_them() {
        let device = create(Path::new("/dev/null")).unwrap();
        assert!(!fcntl_getfl(&device).unwrap().contains(OFlags::NONBLOCK));
    }

    #[test]
    fn a_pipe_is_written_if_a_process_reads() {
        let path = pipe("reader");
        let error = write(&path, "text").unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::ENXIO));

        let long = "x".repeat(300_000);
        let reader = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(&path);
        let reader = reader.unwrap();
        thread::scope(|scope| {
            scope.spawn(|| {
                let flags = fcntl_getfl(&reader).unwrap();
                fcntl_setfl(&reader, flags - OFlags::NONBLOCK).unwrap();
                // The writer opens the pipe soon, and closes it at its end.
                assert!(wait_until_readable(&reader, PIPE_TIMEOUT).unwrap());
                let mut text = String::new();
                (&reader).read_to_string(&mut text).unwrap();
                assert_eq!(text.len(), long.len());
            });
            write(&path, &long).unwrap();
        });
        remove(&path);
    }
}
