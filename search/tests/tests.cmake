# The tests of the search; the exploits are in tests/. Included by tests/CMakeLists.txt.
if(NOT ACR_SANITIZE MATCHES thread)
  test_program(unit_gates unit 300)
  target_link_libraries(unit_gates PRIVATE acromion_search)
  # Foreign kernels, linked with nothing, as candidates are.
  set(tests ${PROJECT_SOURCE_DIR}/search/tests)
  add_library(sandbox_kernels MODULE ${tests}/sandbox_kernels.c)
  target_include_directories(sandbox_kernels PRIVATE ${PROJECT_SOURCE_DIR}/src/core)
  target_compile_options(sandbox_kernels PRIVATE -ffreestanding -fno-stack-protector -fno-sanitize=all -O1
    -Wno-pedantic -Wno-unused-parameter)
  target_link_options(sandbox_kernels PRIVATE -nostdlib -Wl,-Bsymbolic -fno-sanitize=all)
  add_executable(unit_gates_sandbox ${tests}/unit_gates_sandbox.c)
  target_link_libraries(unit_gates_sandbox PRIVATE acromion_test_support acromion_search)
  add_dependencies(unit_gates_sandbox sandbox_kernels)
  register(unit_gates_sandbox unit 300 unit_gates_sandbox $<TARGET_FILE:sandbox_kernels>)
  if(ACR_CUDA)
    test_program(unit_gates_cuda unit 300)
    target_link_libraries(unit_gates_cuda PRIVATE acromion_search fake_driver)
  endif()
endif()
test_program(unit_evolve unit 120)
target_link_libraries(unit_evolve PRIVATE acromion_search)
if(NOT ACR_SANITIZE) # looks at sources
  register(evolve_spaces tree 120 ${Python3_EXECUTABLE} search/tests/evolve_spaces.py $<TARGET_FILE:unit_evolve>)
endif()
# Whole searches: under sanitizers every candidate's process is one more program to start, so only the shortest.
set(searches usage trials)
if(ACR_SANITIZE MATCHES thread) # its runtime makes system calls that the sandbox of candidates forbids
  set(searches "")
elseif(NOT ACR_SANITIZE)
  set(searches usage found moved trials interrupt chat proposers folder survey source backward runs campaign device gpus
    workers mpirun kill)
endif()
set(driver "")
if(ACR_CUDA)
  set(driver --driver ${fake_driver_folder})
endif()
foreach(search IN LISTS searches)
  register(evolve_${search} search 600 ${Python3_EXECUTABLE} search/tests/evolve.py $<TARGET_FILE:acromion-cli>
    ${scratch} --kills 2 ${driver} ${search})
endforeach()
