//! Tests which kernels the driver accepts, and programs of starts that it refuses.

use std::ffi::{CStr, CString, c_char, c_void};
use std::ptr::null;

use peerlane_simulated_driver::in_own_process;

use crate::api::{Answer, cuda, new_stream, start, sync, use_device, zeros};

/// Loads a module with one kernel of these parameters, and finds the kernel.
fn find(name: &str, parameters: &str, wanted: &CStr) -> Answer<usize> {
    let text = CString::new(format!(".visible .entry {name}({parameters})")).unwrap();
    let (mut module, mut function) = (0, 0);
    cuda!(cuModuleLoadDataEx(
        &mut module => &mut usize,
        text.as_ptr() => *const c_char,
        0 => u32,
        null() => *const i32,
        null() => *const *mut c_void
    ))?;
    cuda!(cuModuleGetFunction(
        &mut function => &mut usize,
        module => usize,
        wanted.as_ptr() => *const c_char
    ))?;
    Ok(function)
}

#[test]
fn only_reductions_are_found() {
    let _driver = start();
    use_device(0);
    let sources = ".param .align 8 .b8 reduce_sum_f32_param_1[1024]";
    assert!(find("reduce_sum_f32", sources, c"reduce_sum_f32").is_ok());
    assert_eq!(find("reduce_sum_f32", sources, c"reduce_max_f32"), Err(500));

    let program = ".param .align 8 .b8 start_copy_param_0[3504]";
    assert!(find("start_copy", program, c"start_copy").is_ok());
    let longer = ".param .align 8 .b8 start_copy_param_0[3512]";
    assert_eq!(find("start_copy", longer, c"start_copy"), Err(801));

    // Kernels of others: a launch would read parameters that they do not have.
    let other = ".param .u64 reduce_sum_f32_param_0";
    assert_eq!(find("reduce_sum_f32", other, c"reduce_sum_f32"), Err(801));
    assert_eq!(find("softmax", "", c"softmax"), Err(801));
}

/// As 64-bit words: 6 for the program, of which the fourth holds the numbers of ops and of
/// contributions, and 36 for each op.
type Program = [u64; 438];

const HEAD: usize = 6;
const ALIGN: usize = HEAD + 3;
const FROM: usize = HEAD + 4;
const TO: usize = FROM + 16;

/// Returns a program that copies 64 bytes.
fn copying(control: u64, host: u64, from: u64, to: u64) -> Program {
    let mut program = [0; 438];
    program[..4].copy_from_slice(&[control, host, 0, 1 << 32 | 1]);
    program[HEAD..=ALIGN].copy_from_slice(&[1 << 32, 1, 64, 16]);
    program[FROM..FROM + 2].fill(from);
    program[TO..TO + 2].fill(to);
    program
}

fn launch(function: usize, program: &Program, stream: usize) -> Answer {
    let parameters = [program.as_ptr().cast::<c_void>()];
    let (threads, bytes) = (64_u32, 0_u32);
    cuda!(cuLaunchKernel(
        function => usize,
        2 => u32, 1 => u32, 1 => u32,
        threads => u32, 1 => u32, 1 => u32,
        bytes => u32,
        stream => usize,
        parameters.as_ptr() => *const *const c_void,
        null() => *const *const c_void
    ))
}

#[test]
fn programs_that_no_kernel_runs_are_refused() {
    in_own_process(|| {
        let _driver = start();
        use_device(0);
        let parameter = ".param .align 8 .b8 start_copy_param_0[3504]";
        let function = find("start_copy", parameter, c"start_copy").unwrap();
        let (stream, memory) = (new_stream(), zeros(4096));
        let valid = copying(memory, memory + 64, memory + 128, memory + 256);
        launch(function, &valid, stream).unwrap();
        sync(stream).unwrap();

        let changes: [(usize, u64); 9] = [
            // Ops, shifts and digests, and an alignment that the addresses do not have.
            (3, 1 << 32 | 13),
            (5, 25),
            (5, 2 << 32 | 1),
            (ALIGN, 3),
            (FROM, memory + 4),
            // Kinds, of which one needs another kernel, and lists.
            (HEAD, 1 << 32 | 1),
            (HEAD, 1 << 32 | 4),
            (HEAD, 9 << 32),
            (HEAD + 1, 9),
        ];
        for (index, word) in changes {
            let mut other = valid;
            other[index] = word;
            assert_eq!(launch(function, &other, stream), Err(1), "word {index} is {word:x}");
        }

        // An address without memory is found when the kernel runs.
        let mut other = valid;
        other[TO..TO + 2].fill(0x1000);
        launch(function, &other, stream).unwrap();
        assert_eq!(sync(stream), Err(700));
    });
}
