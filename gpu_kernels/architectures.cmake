# Chooses the GPUs that kernels are compiled for, from the option TANDEM_CUDA, the targets of nvcc
# and the GPUs of this machine. Numbers are 10 * compute capability. tests/architectures_test.cmake
# has the cases.

# Targets for which the kernels' registers were checked (docs/measurements/gpu_kernels.md).
set(TANDEM_CUDA_TARGETS 80 86 89 90 100 120)
# nvcc 13.0 compiles all targets in five to six minutes on one core, one target in two.
set(TANDEM_CORES_FOR_ALL_TARGETS 8)

# The targets of nvcc in ascending order; empty if it does not report them.
function(ask_nvcc nvcc out)
  execute_process(COMMAND ${nvcc} --list-gpu-code OUTPUT_VARIABLE says ERROR_QUIET)
  string(REGEX MATCHALL "sm_[0-9]+" known "${says}")
  list(TRANSFORM known REPLACE "sm_" "")
  list(SORT known COMPARE NATURAL)
  list(REMOVE_DUPLICATES known)
  set(${out} ${known} PARENT_SCOPE)
endfunction()

# The GPUs of this machine, each kind once; empty if there is no GPU or no driver.
function(ask_driver smi out)
  set(says "")
  if(smi)
    execute_process(COMMAND ${smi} --query-gpu=compute_cap --format=csv,noheader
                    OUTPUT_VARIABLE says ERROR_QUIET TIMEOUT 20)
  endif()
  string(REGEX MATCHALL "[0-9]+[.][0-9]" here "${says}")
  list(TRANSFORM here REPLACE "[.]" "")
  list(REMOVE_DUPLICATES here)
  set(${out} ${here} PARENT_SCOPE)
endfunction()

# The newest of `targets` that is not newer than a GPU, or empty. The GPU runs its code if the major
# numbers are equal, otherwise its PTX.
function(target_of gpu targets out)
  set(found "")
  foreach(target ${targets})
    if(NOT target GREATER gpu)
      set(found ${target})
    endif()
  endforeach()
  set(${out} ${found} PARENT_SCOPE)
endfunction()

# "100;120" -> "10.0, 12.0"
function(capabilities_text numbers out)
  list(TRANSFORM numbers REPLACE "^([0-9]+)([0-9])$" "\\1.\\2")
  list(JOIN numbers ", " text)
  set(${out} "${text}" PARENT_SCOPE)
endfunction()

# wanted: all, auto, or a list for CMAKE_CUDA_ARCHITECTURES. auto: all targets if there are enough
# cores, otherwise those of this machine's GPUs, or 8.9 if it has none, because FP8 mma needs 8.9.
# The newest target is also compiled to PTX, which drivers compile for newer GPUs. out: a value for
# CMAKE_CUDA_ARCHITECTURES; out_note: a message for the user, or empty; out_problem: why nothing can
# be compiled, or empty.
function(choose_architectures wanted known here cores out out_note out_problem)
  set(${out} "" PARENT_SCOPE)
  set(${out_note} "" PARENT_SCOPE)
  set(${out_problem} "" PARENT_SCOPE)
  capabilities_text("${known}" knows)
  if(NOT wanted STREQUAL "all" AND NOT wanted STREQUAL "auto")
    foreach(name ${wanted})
      string(REGEX MATCH "^[0-9]+" number "${name}")
      if(known AND number AND NOT number IN_LIST known)
        set(${out_problem} "TANDEM_CUDA=${name}: this nvcc knows ${knows}" PARENT_SCOPE)
        return()
      endif()
    endforeach()
    set(${out} ${wanted} PARENT_SCOPE)
    return()
  endif()

  set(targets "")
  set(unknown "")
  foreach(target ${TANDEM_CUDA_TARGETS})
    if(target IN_LIST known)
      list(APPEND targets ${target})
    else()
      list(APPEND unknown ${target})
    endif()
  endforeach()
  if(NOT targets)
    set(${out_problem} "this nvcc knows ${knows}: none of them is a target of the kernels" PARENT_SCOPE)
    return()
  endif()

  set(chosen ${targets})
  set(with_ptx "")
  if(wanted STREQUAL "auto" AND cores LESS TANDEM_CORES_FOR_ALL_TARGETS)
    set(chosen "")
    foreach(gpu ${here})
      target_of(${gpu} "${targets}" target)
      list(APPEND chosen ${target})
      string(REGEX REPLACE "[0-9]$" "" major "${target}")
      if(target AND NOT gpu MATCHES "^${major}[0-9]$")
        list(APPEND with_ptx ${target})
      endif()
    endforeach()
    if(NOT chosen)
      set(chosen 89)
    endif()
    list(SORT chosen COMPARE NATURAL)
    list(REMOVE_DUPLICATES chosen)
  endif()

  list(GET chosen -1 newest)
  list(APPEND with_ptx ${newest})
  capabilities_text("${chosen}" text)
  capabilities_text("${newest}" newest_text)
  set(note "kernels for compute capability ${text}; other GPUs from ${newest_text} on compile its PTX at their first start")
  if(unknown)
    capabilities_text("${unknown}" text)
    string(APPEND note "; this nvcc does not know ${text}, a newer one does")
  endif()
  if(NOT chosen STREQUAL targets)
    string(APPEND note "; -DTANDEM_CUDA=all compiles for every target")
  endif()
  set(architectures "")
  foreach(target ${chosen})
    if(target IN_LIST with_ptx)
      list(APPEND architectures ${target})
    else()
      list(APPEND architectures ${target}-real)
    endif()
  endforeach()
  set(${out} ${architectures} PARENT_SCOPE)
  set(${out_note} "${note}" PARENT_SCOPE)
endfunction()
